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

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping
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


class Treatment(NamedTuple):
    adds: str  # the mark that it leaves on the object
    removes: str  # the mark that it takes away
    trait: str  # what the object must be
    tools: tuple[str, ...]  # types of receptacle that do it


TREATMENTS = {
    "clean": Treatment("isclean", "", "cleanable", ("sink", "sinkbasin")),
    "heat": Treatment("ishot", "iscool", "heatable", ("microwave",)),
    "cool": Treatment("iscool", "ishot", "coolable", ("fridge",)),
}
KNIVES = ("knife", "butterknife")
# How an object is put somewhere, and the answer, in games of the newer and of the older wording.
PUT = ("move {} to {}", "put {} in/on {}")
PUT_ANSWERS = ("You move the {} to the {}.", "You put the {} in/on the {}.")
Command = tuple[str, ...]  # (verb, its arguments' ids)


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
    commands: Mapping[str, Command]  # by its text, of all that are admissible
    won: bool


@dataclass
class Game:
    """The fixed part of a game; ids are the file's in lower case, types lack their ending ("apple", "fridge")."""

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
        self.first = (
            f"{BANNER}You are in the middle of a room. Looking quickly around you, you see {appliances}."
            f"\n\nYour task is to: {self.task}"
        )
        self._anyway = functools.cache(self._commands_anyway)

    # ---------------------------------------------------------------------------------------------------- commands
    def finish(self, state: World) -> World:
        return state._replace(commands=self._commands(state), won=self.holds(state))

    def accessible(self, state: World, receptacle: str) -> bool:
        return receptacle not in self.traits["openable"] or receptacle in state.opened

    def _commands(self, state: World) -> dict[str, Command]:
        commands = self._anyway(state.location).copy()
        for receptacle in self.at.get(state.location, ()):
            self._add_commands_at(receptacle, state, commands)
        if state.hand is not None:
            self._add_commands_in_hand(state.hand, state, commands)
        return commands

    def _commands_anyway(self, location: str) -> dict[str, Command]:
        """Commands of a location that every state allows."""
        commands: dict[str, Command] = {}
        for receptacle, place in self.location.items():
            if place != location:
                commands[f"go to {self.names[receptacle]}"] = ("go", receptacle)
        commands["look"] = ("look",)
        commands["inventory"] = ("inventory",)
        if not self.old:
            commands["help"] = ("help",)
        return commands

    def _add_commands_at(self, receptacle: str, state: World, commands: dict[str, Command]) -> None:
        names, traits, hand = self.names, self.traits, state.hand
        name, kind = names[receptacle], self.kinds[receptacle]
        commands[f"examine {name}"] = ("examine", receptacle)
        if receptacle in traits["openable"]:
            verb = "close" if receptacle in state.opened else "open"
            commands[f"{verb} {name}"] = (verb, receptacle)
        accessible = self.accessible(state, receptacle)
        can_take = accessible and hand is None
        for o in state.contents[receptacle]:
            if o in traits["toggleable"]:
                commands[f"use {names[o]}"] = ("use", o)
            if can_take and o in traits["pickupable"]:
                commands[f"take {names[o]} from {name}"] = ("take", o, receptacle)
        if hand is None:
            return
        if accessible and (kind, self.kinds.get(hand)) in self.can_contain:
            commands[PUT[self.old].format(names[hand], name)] = ("put", hand, receptacle)
        for verb, treatment in TREATMENTS.items():
            if kind in treatment.tools and hand in traits[treatment.trait]:
                commands[f"{verb} {names[hand]} with {name}"] = (verb, hand, receptacle)

    def _add_commands_in_hand(self, hand: str, state: World, commands: dict[str, Command]) -> None:
        name = self.names[hand]
        commands[f"examine {name}"] = ("examine", hand)
        if self.kinds.get(hand) in KNIVES:
            for o, spot in state.spots:
                if spot == state.location and o in self.traits["sliceable"]:
                    commands[f"slice {self.names[o]} with {name}"] = ("slice", o, hand)

    # ------------------------------------------------------------------------------------------------------- rules
    def step(self, state: World, command: str) -> tuple[World, str]:
        """The next state and the engine's text; a command that is not admissible changes nothing."""
        action = state.commands.get(command.strip())
        if action is None:
            return state, NOTHING_HAPPENS
        match action:
            case ("help",):
                return state, HELP
            case ("look",):
                return state, self._look(state)
            case ("inventory",) if state.hand:
                return state, f"You are carrying: a {self.names[state.hand]}."
            case ("inventory",):
                return state, "You are not carrying anything."
            case ("examine", receptacle) if receptacle in self.location:
                return state, self._view(state, receptacle)
            case ("examine", o):
                return state, self._inspect(state, o)
        new, text = self._change(state, *action)
        return self.finish(new), text

    def _change(self, state: World, verb: str, one: str, two: str = "") -> tuple[World, str]:
        """The change that a verb makes to its first argument, with, from or to its second."""
        name, other = self.names[one], self.names.get(two, "")
        contents, marks = state.contents, state.marks
        match verb:
            case "go":
                new = state._replace(location=self.location[one])
                place = self.names[new.location] if self.old else name
                return new, f"You arrive at {place}. {self._view(new, one)}"
            case "open":
                new = state._replace(opened=state.opened | {one})
                return new, f"You open the {name}. {self._view(new, one)}"
            case "close":
                return state._replace(opened=state.opened - {one}), f"You close the {name}."
            case "take":
                left = tuple(o for o in contents[two] if o != one)
                spots = state.spots - {(one, state.location)}
                new = state._replace(hand=one, contents={**contents, two: left}, spots=spots)
                return new, f"You pick up the {name} from the {other}."
            case "put":
                there = tuple(sorted({*contents[two], one}))
                spots = state.spots | {(one, state.location)}
                new = state._replace(hand=None, contents={**contents, two: there}, spots=spots)
                return new, PUT_ANSWERS[self.old].format(name, other)
            case "use":  # the original's lamps turn on, and say so, each time; none turns off
                return state._replace(marks=marks | {("istoggled", one)}), f"You turn on the {name}."
            case "slice":
                return state._replace(marks=marks | {("issliced", one)}), f"You sliced the {name} with the {other}."
        treatment = TREATMENTS[verb]
        marks = (marks | {(treatment.adds, one)}) - {(treatment.removes, one)}
        return state._replace(marks=marks), f"You {verb} the {name} using the {other}."

    def holds(self, state: World) -> bool:
        """True if the goal holds: it asks for *some* objects of a type, never for certain ones."""
        if self.goal.kind == "look":
            here = (o for receptacle in self.at.get(state.location, ()) for o in state.contents[receptacle])
            return self.kinds.get(state.hand) == self.goal.object and any(self.is_lit_lamp(state, o) for o in here)
        needed = 2 if self.goal.kind == "two" else 1
        for receptacle, objects in state.contents.items():
            if self.kinds[receptacle] == self.goal.target:
                ready = [o for o in objects if self.kinds.get(o) == self.goal.object and self.is_treated(state, o)]
                if len(ready) >= needed:
                    return True
        return False

    def is_lit_lamp(self, state: World, o: str) -> bool:
        return self.kinds.get(o) == self.goal.target and ("istoggled", o) in state.marks

    def is_treated(self, state: World, o: str) -> bool:
        """True if `o` is clean, hot or cool where the goal asks for it."""
        treatment = TREATMENTS.get(self.goal.kind)
        return treatment is None or ((treatment.adds, o) in state.marks and o in self.traits[treatment.trait])

    # -------------------------------------------------------------------------------------------------------- texts
    def _list(self, ids: Iterable[str], article: str = "a ") -> str:
        items = [article + self.names[i] for i in ids]
        if len(items) > 1:
            return ", ".join(items[:-1]) + f", and {items[-1]}"
        return items[0] if items else "nothing"

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
        name = self.names[o]
        marks = {mark for mark, marked in state.marks if marked == o}
        if o in self.traits["isreceptacleobject"]:
            return f"This is a normal {name}. In it, you see {self._list(self.inside.get(o, ()))}."
        words = [word for word in ("hot", "cool", "clean") if f"is{word}" in marks]
        treated = " and ".join(words)
        if treated and "issliced" in marks:
            return f"This is a {treated} sliced {name}."
        if treated:
            return f"This is a {'cold' if treated == 'cool' else treated} {name}."
        if o in self.traits["toggleable"]:
            return f"This {name} is {'on' if 'istoggled' in marks else 'off'}."
        if "issliced" in marks:
            return f"This is a sliced {name}."
        return f"There's nothing special about {name}."
