"""WebShop's expert: it knows the goal, and plays the demonstrations that stage 1 learns from.

It yields (thought, action) while the caller steps the same environment, so that the page at hand is the one that the
next action belongs to. Where the page offers the action (`env.candidates()`), the thought is the page's own wording.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from environments import UserError


class Purchase(NamedTuple):
    """`turns` of the results page, the product and its options, and the reward that the shop pays for it."""

    reward: float
    turns: int
    asin: str
    options: dict[str, str]  # name -> value


def shop(env: Any) -> Iterator[tuple[str, str]]:
    """Buy what pays best within the steps that are left; among equals the first that a shopper would meet."""
    query, purchase = plan(env)
    actions = [f"search[{query}]", *["click[next >]"] * purchase.turns, f"click[{purchase.asin.lower()}]"]
    actions += [*(f"click[{value}]" for value in purchase.options.values()), "click[buy now]"]
    for action in actions:
        said = {offered: thought for thought, offered in env.candidates()}
        yield said.get(action, env.candidates()[0][0]), action  # a search of our own is announced like any other


def plan(env: Any) -> tuple[str, Purchase]:
    """The search and the purchase. Searches come from the instruction; only where none of them finds all that the goal
    asks for, within the steps, the wanted product's title is searched, from its first words to the whole."""
    words = env.goal["name"].split()
    suggested = [action[len("search[") : -1] for _, action in env.candidates()]
    best = None
    for query in [*sorted(suggested, key=len), *(" ".join(words[:n]) for n in (4, 8, len(words)))]:
        purchase = cheapest_best(env, query)
        if purchase and (best is None or purchase.reward > best[1].reward):
            best = query, purchase
            if purchase.reward == 1:
                break
    if best is None:
        raise UserError(f"webshop: no purchase fits into {env.max_steps} steps; give at least 3 (search, click, buy)")
    return best


def cheapest_best(env: Any, query: str) -> Purchase | None:
    """The best purchase among a query's results; of equal ones that with the fewest turns, then the highest place."""
    left = 1000 if env.max_steps is None else env.max_steps - env.steps
    found, best = [], None
    for place, position in enumerate(env.shop.search(query)):
        turns = place // env.shop.page_size
        budget = left - turns - 3  # beside the search, the click on the product and the purchase
        if budget >= 0:
            product = env.shop.products[position]
            reward, parts = env.score(product.asin, {})
            found.append(
                (-(reward + parts["r_type"] * parts["w_option"]), turns, place, budget, product.asin, position)
            )
    for bound, turns, _, budget, asin, position in sorted(found):
        if best and -bound <= best.reward:
            break
        reward, options = choose_options(env, asin, position, budget)
        if best is None or (reward, -turns) > (best.reward, -best.turns):
            best = Purchase(reward, turns, asin, options)
    return best


def choose_options(env: Any, asin: str, position: int, budget: int) -> tuple[float, dict[str, str]]:
    """The options that raise the reward most, one by one, at most `budget` of them; and the reward with them."""
    page = env.shop.item(position)
    offered = [page.clickables[action[6:-1]] for _, action in page.candidates]
    values = [change["option"] for change in offered if "option" in change]
    chosen: dict[str, str] = {}
    reward = env.score(asin, chosen)[0]
    for _ in range(budget):
        raised = [(env.score(asin, chosen | {name: value})[0], {name: value}) for name, value in values]
        more, choice = max(raised, key=lambda pair: pair[0], default=(0.0, {}))
        if more <= reward:
            break
        reward, chosen = more, chosen | choice
    return reward, chosen
