"""Three ways to shop: by a rule, as a careful reader (the expert), and knowing the goal (the oracle).

A player yields (thought, action) while its caller steps the same environment. Rules and reader know the task's sentence
and the pages shown so far; the oracle alone looks at the goal. A thought is the page's own wording of the action.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from qlass import UserError
from qlass.environment import Player

from . import earnings
from .catalogue import OPTION_CLAUSE, described, price_limit
from .engine import BUTTONS
from .search import terms


# ------------------------------------------------------------------------------------------------ what a page shows
class Offer(NamedTuple):
    """A product on a results page."""

    action: str
    affordable: bool  # under the task's price limit; a range of prices: its middle
    shared: frozenset[str]  # the words of the description in its title


def offers(env: Any) -> list[Offer]:
    """The products on the results page at hand."""
    nodes, limit = env.page().split(" [SEP] "), price_limit(env.task)
    plain = frozenset(terms(OPTION_CLAUSE.sub("", described(env.task))))
    lines = {node.lower(): i for i, node in enumerate(nodes)}
    choices = []
    for action in env.valid_actions():
        if (key := action[6:-1]) in BUTTONS:
            continue
        at = lines.get(key, len(nodes))  # asin, title, price
        if prices := re.findall(r"\$([\d.]+)", " ".join(nodes[at + 2 : at + 3])):
            within = sum(map(float, prices)) / len(prices) <= limit
            choices.append(Offer(action, within, plain & frozenset(terms(nodes[at + 1]))))
    return choices


def named_options(env: Any) -> list[str]:
    """The clicks on the option values that the task names: as "name: value", or a value without its name."""
    task, clicks = env.task.lower(), {}
    for thought, action in env.candidates():
        value = action[6:-1]
        name = thought.removesuffix(f" {value}")
        if name != thought and value not in BUTTONS:
            in_full = re.search(rf"(with|and) {re.escape(name)}: {re.escape(value)}(,|$)", task)
            alone = ": " not in task and re.search(rf"(?<!\w){re.escape(value)}(?!\w)", task)
            if (in_full or alone) and len(value) > len(clicks.get(name, "")):  # "dark blue" rather than "blue"
                clicks[name] = value
    return [f"click[{value}]" for value in clicks.values()]


def say(env: Any, action: str) -> tuple[str, str]:
    thoughts = {offered: thought for thought, offered in env.candidates()}
    return thoughts.get(action, env.candidates()[0][0]), action  # a search of our own is announced like any other


def buy(env: Any) -> Player:
    """The options that the task names, as far as the steps allow, and the purchase."""
    for action in named_options(env)[: max(0, env.left - 1)]:
        yield say(env, action)
    yield say(env, "click[buy now]")


def rule(env: Any, worth: Callable[[Offer], Any]) -> Player:
    """Search the description, click the first of the results that are worth most, and buy it."""
    yield say(env, env.valid_actions()[0])
    if choices := offers(env):
        yield say(env, max(choices, key=worth).action)
        yield from buy(env)


RULES: dict[str, Callable[[Offer], Any]] = {
    "first result": lambda offer: 0,
    "first under the price": lambda offer: offer.affordable,
    "most words in common": lambda offer: len(offer.shared),
}


def read(env: Any) -> Player:
    """Open what is under the price, in the order of the page; read its features while the steps allow to act on them;
    go back if it lacks a word of the description. Where nothing has them all, buy what came nearest."""
    yield say(env, env.valid_actions()[0])
    words = frozenset(terms(described(env.task)))
    results = offers(env)
    shelf = [offer for offer in results if offer.affordable] or results
    met: dict[Offer, int] = {}
    for offer in shelf:
        yield say(env, offer.action)
        to_buy = len(named_options(env)) + 1
        if env.left < 4 + to_buy or len(shelf) == 1:  # read, and open another
            break
        item = env.page()
        yield say(env, "click[features]")
        met[offer] = len(words & frozenset(terms(f"{item} {env.page()}")))
        yield say(env, "click[< prev]")
        if met[offer] == len(words):
            break
        if offer is not shelf[-1] and env.left >= 6 + to_buy:  # open another, read, and come back
            yield say(env, "click[< prev]")
            continue
        nearest = max(met, key=lambda offer: met[offer])
        if nearest is not offer:
            yield say(env, "click[< prev]")
            yield say(env, nearest.action)
        break
    if shelf:
        yield from buy(env)


class Purchase(NamedTuple):
    """`turns` of the results page, the product and its options, and the reward that the shop pays for it."""

    reward: float
    turns: int
    position: int  # of the product in the catalogue
    options: dict[str, str]  # name -> value


def know(env: Any) -> Player:
    """Buy what pays best within the steps that are left; among equals the first that a shopper would see."""
    query, purchase = plan(env)
    asin = env.shop.products[purchase.position].asin
    actions = [f"search[{query}]", *["click[next >]"] * purchase.turns, f"click[{asin.lower()}]"]
    actions += [f"click[{value}]" for value in purchase.options.values()]
    for action in [*actions, "click[buy now]"]:
        yield say(env, action)


def plan(env: Any) -> tuple[str, Purchase]:
    """The search and the purchase. Searches come from the instruction; only where none of them finds all that the goal
    asks for, within the steps, the wanted product's title is searched, from its first words to the whole."""
    words = re.sub(r"[\[\]]", " ", env.goal["name"]).split()  # brackets: search[...] can't hold them
    suggested = [action[7:-1] for _, action in env.candidates()]
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
    best, clicks = None, 0
    for place, position in enumerate(env.shop.search(query)):
        turns = place // env.shop.page_size
        budget = env.left - turns - 3  # beside the search, the click on the product and the purchase
        if budget < 0:
            break
        rewards = earnings.rewards(env.shop, env.index, position)
        reward = rewards[min(budget, len(rewards) - 1)]
        if best is None or reward > best.reward:
            best, clicks = Purchase(reward, turns, position, {}), budget
    return best and best._replace(options=choose_options(env, best.position, clicks))


def choose_options(env: Any, position: int, budget: int) -> dict[str, str]:
    """The options that raise the reward most, one by one, at most `budget` of them."""
    page = env.shop.item(position)
    offered = [page.clickables[action[6:-1]] for _, action in page.candidates]
    values = [change["option"] for change in offered if "option" in change]
    options: dict[str, str] = {}
    reward, _ = env.shop.score(env.index, position, ())
    for _ in range(budget):
        raised = []
        for name, value in values:
            more = {**options, name: value}
            raised.append((env.shop.score(env.index, position, tuple(more.values()))[0], more))
        best, more = max(raised, key=lambda pair: pair[0], default=(0.0, {}))
        if best <= reward:
            break
        reward, options = best, more
    return options
