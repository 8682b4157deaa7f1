"""ALFWorld's text engine over immutable states, for the game files that TextWorld plays (`game.tw-pddl`).

    game = games.load(path)
    state, text = game.start, game.first
    state, text = game.step(state, "go to fridge 1")    # states are values: a snapshot is a reference
    state.commands, state.won                           # what can be done now; whether the goal holds

The domain and the grammar are the same in every game but for the task sentence and one of two wordings: in the older
one an object is `put ... in/on ...`, in the newer one it is `move`d and there is `help`. So the rules are written in
Python here, and from a file come the problem (objects, first facts, goal), the sentence, and the wording's version.
All texts, admissible commands and goals agree with TextWorld's (tests/test_alfworld.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

BANNER = "-= Welcome to TextWorld, ALFRED! =-\n\n"
NOTHING_HAPPENS = "Nothing happens."
HELP = """Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""

# verb -> (mark it leaves on the object, mark it removes, what the object must be, types of receptacle that do it)
TREATMENTS = {
    "clean": ("isclean", None, "cleanable", ("sink", "sinkbasin")),
    "heat": ("ishot", "iscool", "heatable", ("microwave",)),
    "cool": ("iscool", "ishot", "coolable", ("fridge",)),
}
KNIVES = ("knife", "butterknife")
# How an object is put somewhere, and the answer, in games of the newer and of the older wording.
PUT, PUT_ANSWERS = ("move {} to {}", "put {} in/on {}"), ("You move the {} to the {}.", "You put the {} in/on the {}.")


class Goal(NamedTuple):
    """`kind` is "place", "clean", "heat", "cool" (treat, then place), "two" (place two), or "look" (under a lamp)."""

    kind: str
    object: str  # type of the object, e.g. "apple"
    target: str  # type of the receptacle, or of the lamp

    @property
    def treatment(self) -> str:
        return self.kind if self.kind in TREATMENTS else ""


class World(NamedTuple):
    """All that changes in a game. Its parts are never modified, so states share them."""

    location: str
    hand: str | None
    contents: Mapping[str, tuple[str, ...]]  # receptacle -> its objects, sorted; an object can lie in two at once
    spots: frozenset[tuple[str, str]]  # (object, location): what a knife can reach, even in a closed receptacle
    opened: frozenset[str]
    marks: frozenset[tuple[str, str]]  # ("ishot", object)
    commands: Mapping[str, tuple[str, ...]]  # text of an admissible command -> (verb, its arguments' ids)
    won: bool


@dataclass
class Game:
    """What stays fixed in a game; ids are the file's in lower case, types lack their ending ("apple", "fridge")."""

    task: str  # "put a hot apple in fridge."
    old: bool  # the older of the two wordings
    goal: Goal
    names: dict[str, str]  # id -> "apple 1"
    kinds: dict[str, str]  # id -> type
    location: dict[str, str]  # receptacle -> location, sorted by receptacle
    can_contain: set[tuple[str, str]]  # (receptacle type, object type)
    traits: dict[str, set[str]]  # "openable", "pickupable", "heatable", ... -> ids
    inside: dict[str, list[str]]  # cup -> what lies in it
    walkthrough: list[str] = field(default_factory=list)  # the shortest plan that real games ship

    def __post_init__(self) -> None:
        self.at: dict[str, list[str]] = defaultdict(list)
        for receptacle, location in self.location.items():
            self.at[location].append(receptacle)
        appliances = self._list(self.location)
        self.first = f"{BANNER}You are in the middle of a room. Looking quickly around you, you see {appliances}."
        self.first += f"\n\nYour task is to: {self.task}"
        self._moves: dict[str, dict[str, tuple[str, ...]]] = {}

    # ------------------------------------------------------------------------------------------------------- rules
    def finish(self, state: World) -> World:
        return state._replace(commands=dict(self._commands(state)), won=self.holds(state))

    def accessible(self, state: World, receptacle: str) -> bool:
        return receptacle not in self.traits["openable"] or receptacle in state.opened

    def _commands(self, state: World) -> Iterator[tuple[str, tuple[str, ...]]]:
        name, kind, traits, hand = self.names, self.kinds, self.traits, state.hand
        if state.location not in self._moves:
            moves = {f"go to {name[r]}": ("go", r) for r, at in self.location.items() if at != state.location}
            moves |= {"look": ("look",), "inventory": ("inventory",)} | ({} if self.old else {"help": ("help",)})
            self._moves[state.location] = moves
        yield from self._moves[state.location].items()
        for r in self.at.get(state.location, ()):
            yield f"examine {name[r]}", ("examine", r)
            if r in traits["openable"]:
                yield (f"close {name[r]}", ("close", r)) if r in state.opened else (f"open {name[r]}", ("open", r))
            for o in state.contents[r]:
                if o in traits["toggleable"]:
                    yield f"use {name[o]}", ("use", o)
                if hand is None and o in traits["pickupable"] and self.accessible(state, r):
                    yield f"take {name[o]} from {name[r]}", ("take", o, r)
            if hand is None:
                continue
            if (kind[r], kind.get(hand)) in self.can_contain and self.accessible(state, r):
                yield PUT[self.old].format(name[hand], name[r]), ("put", hand, r)
            for verb, (_, _, trait, tools) in TREATMENTS.items():
                if hand in traits[trait] and kind[r] in tools:
                    yield f"{verb} {name[hand]} with {name[r]}", (verb, hand, r)
        if hand is None:
            return
        yield f"examine {name[hand]}", ("examine", hand)
        if kind.get(hand) in KNIVES:
            for o, spot in state.spots:
                if spot == state.location and o in traits["sliceable"]:
                    yield f"slice {name[o]} with {name[hand]}", ("slice", o, hand)

    def step(self, state: World, command: str) -> tuple[World, str]:
        """The next state and the engine's text; a command that is not admissible changes nothing."""
        verb, *ids = state.commands.get(command.strip(), (None,))
        a, b, *_ = *ids, "", ""  # what the verb acts on, and with, from or to what
        one, two = self.names.get(a, ""), self.names.get(b, "")
        match verb:
            case None:
                return state, NOTHING_HAPPENS
            case "help":
                return state, HELP
            case "look":
                return state, self._look(state)
            case "inventory":
                hand = state.hand and self.names[state.hand]
                return state, f"You are carrying: a {hand}." if hand else "You are not carrying anything."
            case "examine":
                return state, self._view(state, a) if a in self.location else self._inspect(state, a)
            case "go":
                new, text = state._replace(location=self.location[a]), f"You arrive at {one}."
                if self.old:
                    text = f"You arrive at {self.names[self.location[a]]}."
                text += " " + self._view(new, a)
            case "open":
                new = state._replace(opened=state.opened | {a})
                text = f"You open the {one}. {self._view(new, a)}"
            case "close":
                new, text = state._replace(opened=state.opened - {a}), f"You close the {one}."
            case "take":
                contents = {**state.contents, b: tuple(o for o in state.contents[b] if o != a)}
                new = state._replace(hand=a, contents=contents, spots=state.spots - {(a, state.location)})
                text = f"You pick up the {one} from the {two}."
            case "put":
                contents = {**state.contents, b: tuple(sorted({*state.contents[b], a}))}
                new = state._replace(hand=None, contents=contents, spots=state.spots | {(a, state.location)})
                text = PUT_ANSWERS[self.old].format(one, two)
            case "use":  # the original's lamps turn on, and say so, each time; none turns off
                new, text = state._replace(marks=state.marks | {("istoggled", a)}), f"You turn on the {one}."
            case "slice":
                new = state._replace(marks=state.marks | {("issliced", a)})
                text = f"You sliced the {one} with the {two}."
            case _:
                adds, removes, _, _ = TREATMENTS[verb]
                new = state._replace(marks=(state.marks | {(adds, a)}) - {(removes, a)})
                text = f"You {verb} the {one} using the {two}."
        return self.finish(new), text

    def holds(self, state: World) -> bool:
        """Whether the goal holds: it asks for *some* objects of a type, never for certain ones."""
        kind, goal = self.kinds, self.goal
        if goal.kind == "look":
            lit = (o for r in self.at.get(state.location, ()) for o in state.contents[r] if self.is_lit_lamp(state, o))
            return kind.get(state.hand) == goal.object and any(lit)
        places = [objects for r, objects in state.contents.items() if kind[r] == goal.target]
        counts = (sum(kind.get(o) == goal.object and self.is_treated(state, o) for o in objects) for objects in places)
        return max(counts, default=0) >= (2 if goal.kind == "two" else 1)

    def is_lit_lamp(self, state: World, o: str) -> bool:
        return self.kinds.get(o) == self.goal.target and ("istoggled", o) in state.marks

    def is_treated(self, state: World, o: str) -> bool:
        """Whether `o` is clean, hot or cool where the goal asks for it."""
        if self.goal.kind not in TREATMENTS:
            return True
        mark, _, trait, _ = TREATMENTS[self.goal.kind]
        return (mark, o) in state.marks and o in self.traits[trait]

    # -------------------------------------------------------------------------------------------------------- texts
    def _list(self, ids: Iterable[str], article: str = "a ") -> str:
        items = [article + self.names[i] for i in ids]
        return ", ".join(items[:-1]) + f", and {items[-1]}" if len(items) > 1 else "".join(items) or "nothing"

    def _look(self, state: World) -> str:
        if state.location not in self.at:
            return "You are in the middle of a room. Looking quickly around you, you see nothing."
        return f"You are facing the {self._list(self.at[state.location], '')}. Next to it, you see nothing."

    def _view(self, state: World, receptacle: str) -> str:
        name = self.names[receptacle]
        if not self.accessible(state, receptacle):
            return f"The {name} is closed."
        start = f"The {name} is open. In it" if receptacle in state.opened else f"On the {name}"
        return f"{start}, you see {self._list(state.contents[receptacle])}."

    def _inspect(self, state: World, o: str) -> str:
        """The text on a held object: only the first of the original's cases that applies."""
        name, on = self.names[o], {mark for mark, x in state.marks if x == o}
        if o in self.traits["isreceptacleobject"]:
            return f"This is a normal {name}. In it, you see {self._list(self.inside.get(o, ()))}."
        warmth = "hot" if "ishot" in on else "cool" if "iscool" in on else ""
        words = " and ".join(word for word in (warmth, "clean" if "isclean" in on else "") if word)
        if "issliced" in on and words:
            return f"This is a {words} sliced {name}."
        if words:
            return f"This is a {'cold' if words == 'cool' else words} {name}."
        if o in self.traits["toggleable"]:
            return f"This {name} is {'on' if 'istoggled' in on else 'off'}."
        return f"This is a sliced {name}." if "issliced" in on else f"There's nothing special about {name}."
