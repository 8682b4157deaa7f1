"""ALFWorld's games that agree with what a player has seen of one; what it has not seen is drawn at random."""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import replace
from math import factorial

from environments.alfworld.engine import Game, World
from environments.alfworld.env import ALFWorldEnv
from environments.alfworld.expert import Memory


def imagine(env: ALFWorldEnv, *key: Hashable) -> ALFWorldEnv:
    """A fork in which what no page has shown is drawn at random, by the key."""
    other, rng = env.fork(), random.Random(repr(key))
    other.game, other.state = draw(env.game, env.world(), env.memory, rng)
    other.player = other.game
    return other


def draw(game: Game, state: World, memory: Memory, rng: random.Random) -> tuple[Game, World]:
    """A game and its state that agree with what was seen, with what can be done here, and with the goal being open.

    Things of the task that were not seen are others, elsewhere. Of each type there are in a receptacle as many as
    Poisson says, with the mean of the training games (`Memory.rate`); in all at least as many as the goal asks for, and
    as the numbers in names tell. All else stays: doors, what stands side by side, and things that no plan needs.
    """
    goal, names, kinds, traits, contents = game.goal, game.names, game.kinds, game.traits, dict(state.contents)
    wanted = {goal.object: 2 if goal.kind == "two" else 1} | ({goal.target: 1} if goal.kind == "look" else {})
    for kind, need in wanted.items():
        things = {o for o in kinds if kinds[o] == kind}
        offered = not memory.hand or things & traits["toggleable"]  # `take` or `use` of all that lies open here
        unseen = {*memory.receptacles} - memory.looked - (memory.near - memory.closed if offered else set())
        unseen = [r for r in contents if names[r] in unseen]
        for r in unseen:
            shown = memory.seen.get(names[r], ())
            contents[r] = tuple(o for o in contents[r] if o not in things or names[o] in shown)
        rates = {r: memory.rate(kind, names[r]) + 0.001 for r in unseen if goal != ("place", kind, kinds[r])}
        if rates:
            seen = things & {state.hand, *(o for objects in contents.values() for o in objects)}
            least = max([0, need - len(seen), *(int(names[o].split()[-1]) - len(seen) for o in seen)])
            counts = range(least, least + 9)
            (count,) = rng.choices(counts, [sum(rates.values()) ** n / factorial(n) for n in counts])
            new = [f"{kind} {100 + i}" for i in range(count)]
            for o, r in zip(new, rng.choices([*rates], rates.values(), k=count), strict=True):
                contents[r] += (o,)
            names, kinds = names | dict(zip(new, new, strict=True)), kinds | dict.fromkeys(new, kind)
            traits = {trait: ids.union(new) if ids & things else ids for trait, ids in traits.items()}
    drawn = replace(game, names=names, kinds=kinds, traits=traits)
    here = drawn.finish(state._replace(contents=contents))
    return (drawn, here) if here.won == state.won else draw(game, state, memory, rng)  # two in one place
