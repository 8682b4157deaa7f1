"""How to play ALFWorld: a plan from the complete state (an oracle), and an expert who sees what a player sees.

`plan(game, state)` knows where everything is: it verifies generated games and is the oracle. `Memory` is what a player
knows from the texts so far: which receptacles there are, what was seen in them, what is held, what was heated. Thoughts
restate this and the task, nothing else. The expert also knows how often such things lie in such places in the training
games (`rates`): it decides where to search by that, as anyone can who has played them, and does not say it.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations

from .engine import NOTHING_HAPPENS, PUT, TREATMENTS, Game, Goal, World

HAS_DOOR = ("cabinet", "drawer", "fridge", "microwave", "safe")  # a player expects to have to open these
STATES = {"clean": "clean", "hot": "heat", "cool": "cool"}
DONE = {verb: word for word, verb in STATES.items()}


def told(goal: Goal, sentence: str) -> bool:
    """Whether a sentence says the goal and no more by the names of types, as ALFWorld's own sentences do."""
    words = set(re.findall(r"\w+", sentence))
    treatments = {STATES.get(word, word) for word in words & {*STATES, *TREATMENTS}}
    same = treatments == {goal.treatment} - {""} and ("two" in words) == (goal.kind == "two")
    return same and words >= {goal.object, goal.target}


def kind(name: str) -> str:
    return name.rsplit(" ", 1)[0]


def a(word: str) -> str:
    return f"an {word}" if word[:1] in "aeiou" else f"a {word}"


@dataclass(frozen=True)
class Memory:
    """What a player knows; names as in the texts ("cabinet 2"). A value: `after` returns the next one.

    The wish is the game's goal, which ALFWorld's own sentences say, and which a reader of the annotators' would guess.
    """

    wish: Goal
    rates: Mapping[tuple[str, str], float]  # what to expect before looking (games.Games.rates)
    receptacles: tuple[str, ...]
    seen: Mapping[str, tuple[str, ...]]  # receptacle -> what lies there as far as known
    looked: frozenset[str] = frozenset()  # those of which a text has said all that lies there
    closed: frozenset[str] = frozenset()  # those found closed and not opened since
    near: frozenset[str] = frozenset()  # those within reach: several may stand side by side
    hand: str = ""
    put: str = PUT[0]  # how this game words it
    told: bool = True  # the task's sentence says the wish
    treated: frozenset[tuple[str, str]] = frozenset()  # (verb, object)
    lit: frozenset[str] = frozenset()

    @classmethod
    def first(cls, text: str, goal: Goal, rates: Mapping[tuple[str, str], float], old: bool) -> Memory:
        room, _, sentence = text.partition("Your task is to: ")
        receptacles = tuple(reversed(_things(room)))  # the texts count down: "cabinet 2, a cabinet 1"
        return cls(goal, rates, receptacles, {}, put=PUT[old], told=told(goal, sentence))

    def after(self, command: str, text: str, commands: Container[str]) -> Memory:
        """The memory after a command, the text that answered it, and the commands that are offered next."""
        if text == NOTHING_HAPPENS:
            return self
        verb, one, two = _parse(command)
        if verb in ("go", "open", "examine") and one in self.receptacles:
            new = self
            if verb == "go":
                near = frozenset(r for r in self.receptacles if f"go to {r}" not in commands)
                new = replace(self, near=near, closed=self.closed | {r for r in near if f"open {r}" in commands})
            if text.endswith("is closed."):
                return replace(new, closed=new.closed | {one})
            seen = {**new.seen, one: tuple(_things(text))}
            return replace(new, closed=new.closed - {one}, seen=seen, looked=new.looked | {one})
        if verb == "close":
            return replace(self, closed=self.closed | {one})
        if verb == "take":
            left = tuple(o for o in self.seen.get(two, ()) if o != one)
            return replace(self, hand=one, seen={**self.seen, two: left})
        if verb in ("move", "put"):
            return replace(self, hand="", seen={**self.seen, two: (*self.seen.get(two, ()), one)})
        if verb in TREATMENTS:
            undone = {"heat": "cool", "cool": "heat"}.get(verb)
            return replace(self, treated=self.treated - {(undone, one)} | {(verb, one)})
        return replace(self, lit=self.lit | {one}) if verb == "use" else self

    # ------------------------------------------------------------------------------------------- what follows from it
    def ready(self, o: str) -> bool:
        """Whether `o` is of the wanted type and treated as the task asks."""
        return kind(o) == self.wish.object and (not self.wish.treatment or (self.wish.treatment, o) in self.treated)

    @cached_property
    def in_place(self) -> dict[str, str]:
        """object -> receptacle of those that are where the task wants them; two must lie in the same."""
        if self.wish.kind == "look":
            return {}
        ready = {r: [o for o in self.seen[r] if self.ready(o)] for r in self.seen if kind(r) == self.wish.target}
        best = max(ready, key=lambda r: len(ready[r]), default="")
        return {o: best for o in ready.get(best, ())}

    @cached_property
    def whereabouts(self) -> dict[str, dict[str, str]]:
        """type -> object -> receptacle of the things of the task that were seen and are still to be used."""
        used = {*self.in_place, self.hand}
        seen = [(o, r) for r, objects in self.seen.items() for o in objects if o not in used]
        return {k: {o: r for o, r in seen if kind(o) == k} for k in (self.wish.object, self.wish.target)}

    def rate(self, wanted: str, receptacle: str) -> float:
        return self.rates.get((wanted, kind(receptacle)), 0.0)

    def cost(self, receptacle: str) -> int:
        """Steps to have it before one and open, as far as one can tell."""
        unsure = receptacle not in (*self.seen, *self.near) and kind(receptacle) in HAS_DOOR
        return (receptacle not in self.near) + (receptacle in self.closed or unsure)

    # --------------------------------------------------------------------------------------------------- the expert
    def decide(self) -> str | None:
        """What a sensible person does next; None if everything was searched in vain."""
        wish, hand = self.wish, self.hand
        if not hand:
            places = self.whereabouts[wish.object]
            if not places:
                return self._search(wish.object)
            o = min(places, key=lambda o: self.cost(places[o]))
            return self._reach(places[o]) or f"take {o} from {places[o]}"
        if kind(hand) != wish.object:
            fits = [r for r in self.receptacles if self.rate(kind(hand), r)]
            return self._place(min(fits or self.receptacles, key=self.cost))
        if wish.kind == "look":
            lamps = self.whereabouts[wish.target]
            if not lamps:
                return self._search(wish.target)
            lamp = min(lamps, key=lambda o: self.cost(lamps[o]))
            return f"use {lamp}" if lamps[lamp] in self.near else f"go to {lamps[lamp]}"
        if not self.ready(hand):
            tools = [r for r in self.receptacles if kind(r) in TREATMENTS[wish.treatment][3]]
            tool = min(tools, key=lambda r: r not in self.near, default=None)
            return tool and (f"{wish.treatment} {hand} with {tool}" if tool in self.near else f"go to {tool}")
        targets = [r for r in self.receptacles if kind(r) == wish.target]
        if wish.kind == "two" and self.in_place:
            targets = list(self.in_place.values())
        return self._place(min(targets, key=self.cost)) if targets else None

    def _reach(self, receptacle: str) -> str | None:
        if receptacle not in self.near:
            return f"go to {receptacle}"
        return f"open {receptacle}" if receptacle in self.closed else None

    def _place(self, receptacle: str) -> str:
        return self._reach(receptacle) or self.put.format(self.hand, receptacle)

    def _search(self, wanted: str) -> str | None:
        """The likeliest place for its cost that was not searched yet."""
        unknown = [r for r in self.receptacles if r not in self.looked]
        best = max(unknown, key=lambda r: (self.rate(wanted, r) + 0.001) / max(1, self.cost(r)), default=None)
        return best and (self._reach(best) or f"examine {best}")

    # -------------------------------------------------------------------------------------------------------- thoughts
    def thought(self, command: str) -> str:
        """What is known about a command's object: from the texts so far, and in view of what the task asks.

        None where an annotator wrote the task: a thought would give away how the goal reads the sentence."""
        if not self.told:
            return ""
        verb, one, two = _parse(command)
        wish, hand, object = self.wish, self.hand, self.wish.object
        match verb:
            case "go" | "open":
                return self._about(one)
            case "close":
                return f"The {one} is open."
            case "inventory":
                return f"I hold the {hand}." if hand else "My hands are empty."
            case "look" | "examine":
                if one in self.receptacles and one not in self.looked:
                    return self._about(one)
                return f"I know what is in the {one}." if one in self.looked else "It would tell me what I see here."
            case "slice":
                return "The task asks for no slice."
            case "use" if kind(one) != wish.target:
                return "The task asks for no light."
            case "use":
                with_it = f"I hold the {hand}" if kind(hand) == object else f"I hold no {object}"
                return f"The {one} is {'on' if one in self.lit else 'off'}, and {with_it}."
        if kind(one) != object:
            return f"The {one} is not {a(object)}."
        match verb:
            case "take":
                return f"The {one} is in place already." if one in self.in_place else f"The {one} is {a(object)}."
            case "clean" | "heat" | "cool" if verb != wish.treatment:
                return f"The task asks for no {DONE[verb]} {object}."
            case "clean" | "heat" | "cool":
                return f"The {one} {'is' if self.ready(one) else 'has to be'} {DONE[verb]}."
        if wish.kind == "look":
            return f"The task asks to look at the {one}."
        return f"The {one} is not {DONE[wish.treatment]} yet." if not self.ready(one) else self._about(two)

    def _about(self, receptacle: str) -> str:
        """What is known about a receptacle for what comes next."""
        wish, hand, door = self.wish, self.hand, " and is closed" if receptacle in self.closed else ""
        if hand and kind(hand) != wish.object:
            return f"The {hand} in my hands is not {a(wish.object)}."
        if hand and wish.kind != "look" and not self.ready(hand):
            return f"The {hand} has to be {DONE[wish.treatment]}."
        if hand and wish.kind != "look":
            if kind(receptacle) != wish.target:
                return f"The {receptacle} is no {wish.target}."
            other = next(iter(self.in_place.items()), None) if wish.kind == "two" else None
            if other:
                return f"The {other[0]} is in the {other[1]}, {'here' if other[1] == receptacle else 'not here'}."
            return f"The {hand} belongs in the {receptacle}{door.replace('and is', 'which is')}."
        wanted = wish.target if hand else wish.object
        there = [o for o, r in self.whereabouts[wanted].items() if r == receptacle]
        if there:
            return f"The {there[0]} is in the {receptacle}{door}."
        if receptacle in self.looked:
            return f"There is no {wanted} in the {receptacle}."
        return f"The {receptacle} is {'closed' if door else 'not searched yet'} and may hold {a(wanted)}."


def _things(text: str) -> list[str]:
    return re.findall(r"\ba (\w+ \d+)", text)


def _parse(command: str) -> tuple[str, str, str]:
    """verb, first and second name; "" where there is none."""
    verb, _, rest = command.partition(" ")
    one, _, two = re.sub(r" (from|to|in/on|with) ", "|", rest.removeprefix("to ")).partition("|")
    return verb, one, two


# ---------------------------------------------------------------------------------------------------------------- plans
class _Way:
    """A plan in the making: commands, and what they change."""

    def __init__(self, game: Game, state: World) -> None:
        self.game, self.location, self.hand, self.opened = game, state.location, state.hand, set(state.opened)
        self.commands: list[str] = []

    def reach(self, receptacle: str, inside: bool = True) -> None:
        name = self.game.names[receptacle]
        if self.game.location[receptacle] != self.location:
            self.commands.append(f"go to {name}")
            self.location = self.game.location[receptacle]
        if inside and receptacle in self.game.traits["openable"] and receptacle not in self.opened:
            self.commands.append(f"open {name}")
            self.opened.add(receptacle)

    def take(self, o: str, receptacle: str) -> None:
        self.reach(receptacle)
        self.commands.append(f"take {self.game.names[o]} from {self.game.names[receptacle]}")
        self.hand = o

    def put(self, receptacle: str) -> None:
        self.reach(receptacle)
        self.commands.append(PUT[self.game.old].format(self.game.names[self.hand], self.game.names[receptacle]))
        self.hand = None


def plan(game: Game, state: World) -> list[str] | None:
    """The shortest of the sensible ways to the goal, for a player who knows where everything is; None if there is none.

    A way drops what is wrongly held, then brings the object(s): fetch, treat, place; one way for each choice of
    objects and receptacles. Choices that differ in nothing that counts for the length are tried once.
    """
    return [] if state.won else min(_ways(game, state), key=len, default=None)


def _ways(game: Game, state: World) -> Iterator[list[str]]:
    goal, kinds, hand = game.goal, game.kinds, state.hand
    sources = {hand: [None]} if kinds.get(hand) == goal.object else {}
    for receptacle, objects in state.contents.items():
        for o in objects:
            if kinds.get(o) == goal.object and o in game.traits["pickupable"] and o != hand:
                sources.setdefault(o, []).append(receptacle)
    tools = [None]
    if goal.kind in TREATMENTS:
        tools = [r for r in game.location if kinds[r] in TREATMENTS[goal.kind][3]]
    targets = [r for r in game.location if kinds[r] == goal.target]
    if goal.kind == "look":
        targets = [r for r, objects in state.contents.items() if any(kinds.get(o) == goal.target for o in objects)]
    elif (goal.target, goal.object) not in game.can_contain:
        return
    fetches = [(o, r) for o in sources for r in sources[o]]
    near = {state.location, *(game.location[r] for _, r in fetches if r), *(game.location[r] for r in tools if r)}

    def alike(r: str) -> tuple:  # what of a target counts for the length of a way
        there = {o for o in state.contents[r] if kinds.get(o) == goal.object and game.is_treated(state, o)}
        return game.location[r] if game.location[r] in near else None, game.accessible(state, r), frozenset(there)

    for target in {alike(r): r for r in reversed(targets)}.values():
        there = alike(target)[2] if goal.kind != "look" else ()
        need = 2 - len(there) if goal.kind == "two" else 1
        for chosen in permutations([fetch for fetch in fetches if fetch[0] not in there], need):
            if len({o for o, _ in chosen}) < need or (hand in sources and hand not in there and chosen[0][0] != hand):
                continue
            for tool, way in ((tool, _Way(game, state)) for tool in tools):
                if hand and chosen[0][0] != hand and not _drop(way, state, chosen[0][1]):
                    return
                for o, source in chosen:
                    if source:
                        way.take(o, source)
                    if goal.kind == "look":
                        _light(way, state, target)
                        break
                    if tool and not game.is_treated(state, o):
                        way.reach(tool, inside=False)
                        way.commands.append(f"{goal.kind} {game.names[o]} with {game.names[tool]}")
                    if goal.kind == "two" or not any(o in state.contents[r] for r in targets if r != source):
                        way.put(target)  # else it lies there too: in some real games an object is in two receptacles
                yield way.commands


def _light(way: _Way, state: World, receptacle: str) -> None:
    lamps = [o for o in state.contents[receptacle] if way.game.kinds.get(o) == way.game.goal.target]
    way.reach(receptacle, inside=False)
    if not any(way.game.is_lit_lamp(state, o) for o in lamps):
        way.commands.append(f"use {way.game.names[lamps[0]]}")


def _drop(way: _Way, state: World, source: str) -> bool:
    """Put down what is held where it costs least: here, on the way, or anywhere. Some objects fit nowhere."""
    game, kind = way.game, way.game.kinds.get(way.hand)
    near = (way.location, game.location[source])
    fits = [r for r in game.location if (game.kinds[r], kind) in game.can_contain]
    if fits:
        # What is wanted may lie in one that is closed, which is opened in any case.
        opens = {r: r != source and not game.accessible(state, r) for r in fits}
        way.put(min(fits, key=lambda r: 2 * (game.location[r] not in near) + opens[r]))
    return bool(fits)
