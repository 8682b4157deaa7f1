"""An expert of ALFWorld that sees no more than a player.

`Memory` is what a player knows from the texts so far: which receptacles there are, what was seen in them, what is held,
what was heated. Thoughts restate this and the task, nothing else. The expert also knows how often such things lie in
such places in the training games (`rates`): it decides where to search by that, as anyone can who has played them, and
does not say it.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from .engine import NOTHING_HAPPENS, PUT, TREATMENTS, Goal

HAS_DOOR = ("cabinet", "drawer", "fridge", "microwave", "safe")  # a player expects to have to open these
STATES = {"clean": "clean", "hot": "heat", "cool": "cool"}
DONE = {verb: word for word, verb in STATES.items()}


def is_explicit(goal: Goal, sentence: str) -> bool:
    """True if a sentence says the goal and no more by the names of types, as ALFWorld's own sentences do."""
    words = set(re.findall(r"\w+", sentence))
    treatments = {STATES.get(word, word) for word in words & {*STATES, *TREATMENTS}}
    if treatments != {goal.treatment} - {""}:
        return False
    return ("two" in words) == (goal.kind == "two") and words >= {goal.object, goal.target}


def kind(name: str) -> str:
    return name.rsplit(" ", 1)[0]


def a(word: str) -> str:
    return f"an {word}" if word[:1] in "aeiou" else f"a {word}"


@dataclass(frozen=True)
class Memory:
    """A player's knowledge; names as in the texts ("cabinet 2"). A value: `after` returns the next one.

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
    explicit: bool = True  # the task's sentence says the wish
    treated: frozenset[tuple[str, str]] = frozenset()  # (verb, object)
    lit: frozenset[str] = frozenset()

    @classmethod
    def first(cls, text: str, goal: Goal, rates: Mapping[tuple[str, str], float], old: bool) -> Memory:
        room, _, sentence = text.partition("Your task is to: ")
        receptacles = tuple(reversed(_things(room)))  # the texts count down: "cabinet 2, a cabinet 1"
        return cls(goal, rates, receptacles, {}, put=PUT[old], explicit=is_explicit(goal, sentence))

    def after(self, command: str, text: str, commands: Container[str]) -> Memory:
        """The memory after a command, the text that answered it, and the commands that are offered next."""
        if text == NOTHING_HAPPENS:
            return self
        verb, one, two = _parse(command)
        match verb:
            case "go" | "open" | "examine" if one in self.receptacles:
                memory = self._arrived(commands) if verb == "go" else self
                return memory._read(one, text)
            case "close":
                return replace(self, closed=self.closed | {one})
            case "take":
                left = tuple(o for o in self.seen.get(two, ()) if o != one)
                return replace(self, hand=one, seen={**self.seen, two: left})
            case "move" | "put":
                there = (*self.seen.get(two, ()), one)
                return replace(self, hand="", seen={**self.seen, two: there})
            case "clean" | "heat" | "cool":
                undone = {"heat": "cool", "cool": "heat"}.get(verb)
                return replace(self, treated=self.treated - {(undone, one)} | {(verb, one)})
            case "use":
                return replace(self, lit=self.lit | {one})
        return self

    def _arrived(self, commands: Container[str]) -> Memory:
        """The memory before the receptacles to which these commands offer no way."""
        near = frozenset(r for r in self.receptacles if f"go to {r}" not in commands)
        shut = {r for r in near if f"open {r}" in commands}
        return replace(self, near=near, closed=self.closed | shut)

    def _read(self, receptacle: str, text: str) -> Memory:
        """The memory after a text on what lies in or on a receptacle."""
        if text.endswith("is closed."):
            return replace(self, closed=self.closed | {receptacle})
        seen = {**self.seen, receptacle: tuple(_things(text))}
        looked = self.looked | {receptacle}
        return replace(self, closed=self.closed - {receptacle}, seen=seen, looked=looked)

    # ------------------------------------------------------------------------------------------- what follows from it
    def ready(self, o: str) -> bool:
        """True if `o` is of the wanted type and treated as the task asks."""
        if kind(o) != self.wish.object:
            return False
        return not self.wish.treatment or (self.wish.treatment, o) in self.treated

    @cached_property
    def in_place(self) -> dict[str, str]:
        """object -> receptacle of those that are where the task wants them; two must lie in the same."""
        ready: dict[str, str] = {}
        if self.wish.kind == "look":
            return ready
        for receptacle, objects in self.seen.items():
            if kind(receptacle) == self.wish.target:
                there = {o: receptacle for o in objects if self.ready(o)}
                if len(there) > len(ready):
                    ready = there
        return ready

    @cached_property
    def whereabouts(self) -> dict[str, dict[str, str]]:
        """type -> object -> receptacle of the things of the task that were seen and are still to be used."""
        places: dict[str, dict[str, str]] = {self.wish.object: {}, self.wish.target: {}}
        for receptacle, objects in self.seen.items():
            for o in objects:
                if kind(o) in places and o != self.hand and o not in self.in_place:
                    places[kind(o)][o] = receptacle
        return places

    def rate(self, wanted: str, receptacle: str) -> float:
        return self.rates.get((wanted, kind(receptacle)), 0.0)

    def cost(self, receptacle: str) -> int:
        """Steps to have it before one and open, as far as one can tell."""
        if receptacle in self.near:
            return int(receptacle in self.closed)
        may_be_closed = receptacle not in self.seen and kind(receptacle) in HAS_DOOR
        return 1 + (receptacle in self.closed or may_be_closed)

    # --------------------------------------------------------------------------------------------------- the expert
    def decide(self) -> str | None:
        """The next command of a sensible person; None if everything was searched in vain."""
        if not self.hand:
            return self._find(self.wish.object)
        if kind(self.hand) != self.wish.object:
            fits = [r for r in self.receptacles if self.rate(kind(self.hand), r)]
            return self._place(min(fits or self.receptacles, key=self.cost))
        if self.wish.kind == "look":
            return self._find(self.wish.target)
        if not self.ready(self.hand):
            return self._treat()
        targets = [r for r in self.receptacles if kind(r) == self.wish.target]
        if self.wish.kind == "two" and self.in_place:
            targets = list(self.in_place.values())
        return self._place(min(targets, key=self.cost)) if targets else None

    def _find(self, wanted: str) -> str | None:
        """Take the object, or use the lamp, that was seen the fewest steps from here, or search for one."""
        places = self.whereabouts[wanted].items()
        if not places:
            return self._search(wanted)
        o, receptacle = min(places, key=lambda place: self.cost(place[1]))
        if wanted == self.wish.object:
            return self._reach(receptacle) or f"take {o} from {receptacle}"
        return f"use {o}" if receptacle in self.near else f"go to {receptacle}"  # its light needs no open door

    def _treat(self) -> str | None:
        treatment = self.wish.treatment
        tools = [r for r in self.receptacles if kind(r) in TREATMENTS[treatment].tools]
        if not tools:
            return None
        tool = min(tools, key=lambda r: r not in self.near)
        return f"{treatment} {self.hand} with {tool}" if tool in self.near else f"go to {tool}"

    def _reach(self, receptacle: str) -> str | None:
        if receptacle not in self.near:
            return f"go to {receptacle}"
        return f"open {receptacle}" if receptacle in self.closed else None

    def _place(self, receptacle: str) -> str:
        return self._reach(receptacle) or self.put.format(self.hand, receptacle)

    def _search(self, wanted: str) -> str | None:
        """The likeliest place for its cost that was not searched yet."""

        def worth(receptacle: str) -> float:
            return (self.rate(wanted, receptacle) + 0.001) / max(1, self.cost(receptacle))

        unknown = [r for r in self.receptacles if r not in self.looked]
        if not unknown:
            return None
        best = max(unknown, key=worth)
        return self._reach(best) or f"examine {best}"

    # -------------------------------------------------------------------------------------------------------- thoughts
    def thought(self, command: str) -> str:
        """Knowledge about a command's object, from the texts so far, and in view of what the task asks.

        None where an annotator wrote the task: a thought would give away how the goal reads the sentence."""
        if not self.explicit:
            return ""
        verb, one, two = _parse(command)
        match verb:
            case "go" | "open":
                return self._about(one)
            case "close":
                return f"The {one} is open."
            case "inventory":
                return f"I hold the {self.hand}." if self.hand else "My hands are empty."
            case "look" | "examine":
                return self._on_looking(one)
            case "slice":
                return "The task asks for no slice."
            case "use":
                return self._on_light(one)
        wish = self.wish
        if kind(one) != wish.object:
            return f"The {one} is not {a(wish.object)}."
        match verb:
            case "take" if one in self.in_place:
                return f"The {one} is in place already."
            case "take":
                return f"The {one} is {a(wish.object)}."
            case "clean" | "heat" | "cool" if verb != wish.treatment:
                return f"The task asks for no {DONE[verb]} {wish.object}."
            case "clean" | "heat" | "cool":
                return f"The {one} {'is' if self.ready(one) else 'has to be'} {DONE[verb]}."
        if wish.kind == "look":
            return f"The task asks to look at the {one}."
        if not self.ready(one):
            return f"The {one} is not {DONE[wish.treatment]} yet."
        return self._about(two)

    def _on_looking(self, name: str) -> str:
        if name in self.looked:
            return f"I know what is in the {name}."
        return self._about(name) if name in self.receptacles else "It would tell me what I see here."

    def _on_light(self, lamp: str) -> str:
        if kind(lamp) != self.wish.target:
            return "The task asks for no light."
        thing = f"the {self.hand}" if kind(self.hand) == self.wish.object else f"no {self.wish.object}"
        return f"The {lamp} is {'on' if lamp in self.lit else 'off'}, and I hold {thing}."

    def _about(self, receptacle: str) -> str:
        """Knowledge about a receptacle for the next step."""
        wish, hand = self.wish, self.hand
        if hand and kind(hand) != wish.object:
            return f"The {hand} in my hands is not {a(wish.object)}."
        if hand and wish.kind != "look":
            return self._about_target(receptacle)
        wanted = wish.target if hand else wish.object
        closed = receptacle in self.closed
        for o, place in self.whereabouts[wanted].items():
            if place == receptacle:
                return f"The {o} is in the {receptacle}{' and is closed' if closed else ''}."
        if receptacle in self.looked:
            return f"There is no {wanted} in the {receptacle}."
        return f"The {receptacle} is {'closed' if closed else 'not searched yet'} and may hold {a(wanted)}."

    def _about_target(self, receptacle: str) -> str:
        """Knowledge about a receptacle for the object in one's hands."""
        wish, hand = self.wish, self.hand
        if not self.ready(hand):
            return f"The {hand} has to be {DONE[wish.treatment]}."
        if kind(receptacle) != wish.target:
            return f"The {receptacle} is no {wish.target}."
        if wish.kind == "two" and self.in_place:
            other, place = next(iter(self.in_place.items()))
            return f"The {other} is in the {place}, {'here' if place == receptacle else 'not here'}."
        door = " which is closed" if receptacle in self.closed else ""
        return f"The {hand} belongs in the {receptacle}{door}."


def _things(text: str) -> list[str]:
    return re.findall(r"\ba (\w+ \d+)", text)


def _parse(command: str) -> tuple[str, str, str]:
    """verb, first and second name; "" where there is none."""
    verb, _, rest = command.partition(" ")
    one, _, two = re.sub(r" (from|to|in/on|with) ", "|", rest.removeprefix("to ")).partition("|")
    return verb, one, two
