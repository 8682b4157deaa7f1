"""WebShop's instructions in other words, by rules (App. A.3.2 has a language model do it).

The rules change the frame of the request ("i need", "find me"), the order of its clauses and of its options, how
options and price are put, and how units are written. Attributes, option names and values, the kind of product and the
amount stay as they are.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Callable

from environments.webshop.catalogue import OPTION_CLAUSE, PRICE_CLAUSE

# --------------------------------------------------------------------------------------------------------------- rules
# No frame has a word of the shop's own buttons ("search", "buy"): it is not what the page should be matched with.

OPENING = re.compile(
    r"(please )?(((can|could) you )?((help me )?find|show|get)( me)?|"
    r"i( am|['’]?m) (looking for|searching for|interested in|in need of)|looking for|"
    r"i( want| need| would like|['’]?d like)( to (find|get|order|have|buy|purchase))?) (?!to |you |me |for )",
    re.I,
)
FRAMES = ["find me", "i need", "i am looking for", "i would like", "i want to order", "please help me find", "show me",
          "i am interested in"]  # fmt: skip
PREFACES = ["my request:", "this is what i am after:", "please help me with this:"]  # where no known frame opens it
PRICES = ["price lower than {x} dollars", "for less than {n} dollars", "under ${x}", "with a price below {x} dollars",
          "costing less than ${n}", "priced below ${n}"]  # fmt: skip
OPTIONS: list[Callable[[list[tuple[str, str]]], str]] = [
    lambda options: "with " + ", and ".join(f"{name}: {value}" for name, value in options),
    lambda options: "in " + " and ".join(f"{name}: {value}" for name, value in options),
    lambda options: " and ".join(f"the {name} should be {value}" for name, value in options),
    lambda options: "(" + "; ".join(f"{name}: {value}" for name, value in options) + ")",
]
# Not feet and pounds: "2 foot scrubs" and "2 pound cakes" are no measures.
UNITS = {"oz": "ounce", "fl oz": "fluid ounce", "ml": "milliliter", "cm": "centimeter"}
UNITS |= {long: short for short, long in UNITS.items()} | {f"{long}s": short for short, long in UNITS.items()}
UNIT = re.compile(rf"(?<=\d )({'|'.join(sorted(UNITS, key=len, reverse=True))})\b(?!\.)", re.I)


def clauses(task: str) -> tuple[str, list[tuple[str, str]], str]:
    """What is wanted, the options as (name, value), the amount of the price limit; the latter two may be empty."""
    request = task.strip()
    price = PRICE_CLAUSE.search(request)
    request = request[: price.start()] if price else request
    clause = OPTION_CLAUSE.search(request)
    listed = re.split(r", and (?=[^,:]+: )", clause[0].removeprefix(" with ")) if clause else []
    options = [tuple(option.split(": ", 1)) for option in listed]
    if any(re.search(r"\b(and|of|the)\b", name) for name, _ in options):  # a colon in somebody's own words
        clause, options = None, []
    return request[: clause.start()] if clause else request, options, re.search(r"[\d.]+", price[0])[0] if price else ""


@functools.lru_cache(maxsize=8)  # the candidates of a step come one after the other
def wordings(task: str) -> list[str]:
    """All that the rules make of a task, without the task itself, in an order that depends on the task alone."""
    core, options, amount = clauses(task)
    opening = OPENING.match(core)
    frames, wanted = (FRAMES, core[opening.end() :]) if opening else (PREFACES, core)
    requests = [core, *(f"{frame} {wanted}" for frame in frames)]
    requests += [UNIT.sub(lambda m: UNITS[m[0].lower()], request) for request in requests]
    limits = [form.format(x=amount, n=amount.removesuffix(".00")) for form in PRICES] if amount else [""]
    chosen = [form(list(order)) for order in itertools.islice(itertools.permutations(options), 6) for form in OPTIONS]
    chosen = chosen if options else [""]
    sentences = (
        ", ".join(filter(None, order))
        for parts in itertools.product(dict.fromkeys(requests), chosen, limits)
        for order in itertools.permutations(parts)
    )
    distinct = [text for text in dict.fromkeys(sentences) if text != task]
    return random.Random(task).sample(distinct, len(distinct))


def paraphrase(task: str, index: int) -> str:
    """Wording `index` of a task: 0 the task itself; all are different until the rules have no more."""
    others = wordings(task) if index else []
    return others[(index - 1) % len(others)] if index else task
