"""Plans from the complete state of a game: they verify generated games, and are the oracle."""

from collections.abc import Iterable, Iterator
from itertools import permutations

from .engine import PUT, TREATMENTS, Game, World


class _Way:
    """A plan in the making: commands, and what they change."""

    def __init__(self, game: Game, state: World) -> None:
        self.game = game
        self.names = game.names
        self.state = state
        self.location = state.location
        self.hand = state.hand
        self.opened = set(state.opened)
        self.commands: list[str] = []

    def go(self, receptacle: str) -> None:
        """Go to its place, unless the player is there."""
        place = self.game.location[receptacle]
        if place != self.location:
            self.commands.append(f"go to {self.names[receptacle]}")
            self.location = place

    def reach(self, receptacle: str) -> None:
        """Go there, and open it if it is closed."""
        self.go(receptacle)
        if receptacle in self.game.traits["openable"] and receptacle not in self.opened:
            self.commands.append(f"open {self.names[receptacle]}")
            self.opened.add(receptacle)

    def take(self, o: str, receptacle: str) -> None:
        """Take an object from where it lies."""
        self.reach(receptacle)
        self.commands.append(f"take {self.names[o]} from {self.names[receptacle]}")
        self.hand = o

    def put(self, receptacle: str) -> None:
        """Put down what is held."""
        self.reach(receptacle)
        command = PUT[self.game.old]
        self.commands.append(command.format(self.names[self.hand], self.names[receptacle]))
        self.hand = None

    def light(self, receptacle: str) -> None:
        """Go where a lamp of the goal's type is, and use it unless one is lit."""
        game, objects = self.game, self.state.contents[receptacle]
        lamps = [o for o in objects if game.kinds.get(o) == game.goal.target]
        self.go(receptacle)
        if not any(game.is_lit_lamp(self.state, o) for o in lamps):
            self.commands.append(f"use {self.names[lamps[0]]}")

    def drop(self, receptacles: list[str], source: str) -> None:
        """Put down what is held in one of these where it costs least: here, on the way to `source`, or anywhere."""
        game = self.game
        near = (self.location, game.location[source])

        def steps(receptacle: str) -> int:
            # What is wanted may lie in one that is closed, which is opened in any case.
            opens = receptacle != source and not game.accessible(self.state, receptacle)
            return 2 * (game.location[receptacle] not in near) + opens

        self.put(min(receptacles, key=steps))


def plan(game: Game, state: World) -> list[str] | None:
    """The shortest of the sensible ways to the goal, for a player who knows where everything is; None if there is none.

    A way drops what is wrongly held, then brings the object(s): fetch, treat, place; one way for each choice of
    objects and receptacles. Choices that differ in nothing that counts for the length are tried once.
    """
    return [] if state.won else min(_ways(game, state), key=len, default=None)


Fetch = tuple[str, str | None]  # an object of the goal's type, and a receptacle where it lies; None: in one's hands
Choice = tuple[Fetch, ...]  # what a way brings, in this order


def _ways(game: Game, state: World) -> Iterator[list[str]]:
    """The commands of a way, for each choice of objects, tool and target.

    There is none where the goal's objects do not fit into its target.
    """
    goal, hand = game.goal, state.hand
    if goal.kind != "look" and (goal.target, goal.object) not in game.can_contain:
        return
    fits = [r for r in game.location if (game.kinds[r], game.kinds.get(hand)) in game.can_contain]
    fetches = _fetches(game, state)
    tools: list[str | None] = [None]
    if goal.kind in TREATMENTS:
        tools = [r for r in game.location if game.kinds[r] in TREATMENTS[goal.kind].tools]
    targets = _targets(game, state)
    used = [r for _, r in fetches] + tools
    near = {state.location} | {game.location[r] for r in used if r}
    for target in _unlike(game, state, targets, near):
        there = frozenset() if goal.kind == "look" else _ready(game, state, target)
        needed = 2 - len(there) if goal.kind == "two" else 1
        for choice in _choices(fetches, there, needed, hand):
            for tool in tools:
                way = _Way(game, state)
                first, place = choice[0]
                if hand and first != hand:
                    if not fits:  # some objects can be put down nowhere
                        return
                    way.drop(fits, place)
                _bring(way, choice, tool, target, targets)
                yield way.commands


def _fetches(game: Game, state: World) -> list[Fetch]:
    """One for each place of each object, those of an object together."""
    wanted = game.goal.object
    places: dict[str, list[str | None]] = {}
    if game.kinds.get(state.hand) == wanted:
        places[state.hand] = [None]
    for receptacle, objects in state.contents.items():
        for o in objects:
            if game.kinds.get(o) == wanted and o in game.traits["pickupable"] and o != state.hand:
                places.setdefault(o, []).append(receptacle)
    return [(o, receptacle) for o, receptacles in places.items() for receptacle in receptacles]


def _targets(game: Game, state: World) -> list[str]:
    """The places for the objects: receptacles of the goal's type.

    Where an object is looked at under a lamp, they are the receptacles with such a lamp.
    """
    target = game.goal.target
    if game.goal.kind != "look":
        return [r for r in game.location if game.kinds[r] == target]
    return [r for r, objects in state.contents.items() if target in map(game.kinds.get, objects)]


def _ready(game: Game, state: World, target: str) -> frozenset[str]:
    """The objects that lie in a target as the goal wants it."""
    objects, wanted = state.contents[target], game.goal.object
    return frozenset(o for o in objects if game.kinds.get(o) == wanted and game.is_treated(state, o))


def _unlike(game: Game, state: World, targets: list[str], near: set[str]) -> Iterable[str]:
    """One target of each group whose members give plans of the same length."""
    alike = {}
    for target in reversed(targets):
        place = game.location[target]
        if place not in near:
            place = ""  # one that takes a step of its own, wherever it is
        alike[place, game.accessible(state, target), _ready(game, state, target)] = target
    return alike.values()


def _choices(fetches: list[Fetch], there: frozenset[str], needed: int, hand: str | None) -> Iterator[Choice]:
    """The objects to fetch, in order: each object once, and first the one in one's hands."""
    open_fetches = [fetch for fetch in fetches if fetch[0] not in there]
    in_hand = any(o == hand for o, _ in open_fetches)
    for choice in permutations(open_fetches, needed):
        objects = [o for o, _ in choice]
        if len(set(objects)) == needed and (not in_hand or objects[0] == hand):
            yield choice


def _bring(way: _Way, choice: Choice, tool: str | None, target: str, targets: list[str]) -> None:
    """Fetch, treat and place each object of a choice."""
    game, state, goal = way.game, way.state, way.game.goal
    for o, source in choice:
        if source:
            way.take(o, source)
        if goal.kind == "look":
            way.light(target)
            return
        if tool and not game.is_treated(state, o):
            way.go(tool)
            way.commands.append(f"{goal.kind} {way.names[o]} with {way.names[tool]}")
        # In some real games an object lies in two receptacles: taken from one it is still in the other.
        in_place = any(o in state.contents[r] for r in targets if r != source)
        if goal.kind == "two" or not in_place:
            way.put(target)
