"""The reward that can still be earned in a shop. It sees the goal, so it is for oracles only."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

from .engine import Session, Shop
from .words import plain_color, similar

Options = tuple[tuple[str, str], ...]  # (name, value) as a session has them
Met = dict[str, dict[str, frozenset[int]]]  # option name -> value -> which of the goal's options it satisfies


@lru_cache(1 << 14)
def options_met(shop: Shop, goal: int, i: int) -> Met:
    """The wishes that the options of product i satisfy."""
    wanted = [*enumerate(shop.wanted_options(goal))]
    met: Met = {}
    page = shop.item(i)
    for _, action in page.candidates:  # not all clickables can be clicked
        change = page.clickables[action[6:-1]]
        if "option" in change:
            name, value = change["option"]
            plain = plain_color(value)
            met.setdefault(name, {})[value] = frozenset(n for n, option in wanted if similar(plain, option))
    return met


@lru_cache(1 << 18)
def rewards(shop: Shop, goal: int, i: int, options: Options = ()) -> tuple[float, ...]:
    """The best reward for product i after at most 0, 1, 2, ... clicks on options, from the options that are set."""
    met, before = options_met(shop, goal, i), dict(options)
    fewest = {frozenset(): 0}  # which options are satisfied -> clicks
    # One name after another, as a product has one value of each: the value that is set costs nothing, another a click.
    for name, values in met.items():
        kept = values.get(before.get(name), frozenset())
        moves = [(kept, 0), *((gain, 1) for gain in set(values.values()))]
        reached: dict[frozenset, float] = {}
        for (have, clicks), (gain, cost) in itertools.product(fewest.items(), moves):
            reached[have | gain] = min(clicks + cost, reached.get(have | gain, math.inf))
        fewest = reached
    best = []
    for clicks in range(len(met) + 1):
        most = max(len(have) for have, cost in fewest.items() if cost <= clicks)
        best.append(shop.reward(goal, i, most))
    return tuple(best)


def purchase(shop: Shop, goal: int, i: int, options: Options, before: int, steps: int, gamma: float) -> float:
    """The best of gamma ** (steps taken) * reward for product i, whose page is `before` steps away."""
    left = steps - before  # for clicks on options and, as the last one, the purchase itself
    if left < 1:
        return 0.0
    best = enumerate(rewards(shop, goal, i, options)[:left], before + 1)
    return max(gamma**step * reward for step, reward in best)


@lru_cache(1 << 18)
def results_value(shop: Shop, goal: int, query: str, number: int, before: int, steps: int, gamma: float) -> float:
    """The best purchase from page `number` of a query's results: turn to a product's page and click it first."""
    best = 0.0
    for rank, i in enumerate(shop.search(query)):
        turns = abs(rank // shop.page_size + 1 - number)
        best = max(best, purchase(shop, goal, i, (), before + turns + 1, steps, gamma))
    return best


def value(shop: Shop, session: Session, goal: int, steps: int, gamma: float = 1.0) -> float:
    """The best gamma ** n * reward of a purchase after n <= `steps` steps.

    It weighs buying this product after the best clicks on options, every product of this query's results, and those of
    a new search among `queries`, which takes `back to search` first. That is exact for candidates that are valid
    actions, and a lower bound for an agent that searches words of its own.
    """
    if session.page == "done":
        return session.reward
    # A new search: on the start page a step, on others one more, which goes back to it.
    anew = 1 if session.page == "start" else 2
    best = max(results_value(shop, goal, query, 1, anew, steps, gamma) for query in shop.queries(goal))
    if session.page == "start":
        return best
    # This purchase: from the page of a description, features or reviews a click leads to the product's own.
    to_item = int(session.page not in ("results", "item"))
    to_results = 0 if session.page == "results" else to_item + 1
    if session.page != "results":
        best = max(best, purchase(shop, goal, session.product, session.options, to_item, steps, gamma))
    return max(best, results_value(shop, goal, session.query, session.number, to_results, steps, gamma))
