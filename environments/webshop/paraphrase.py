"""The task in other words, so that each of the M candidates of a step is drawn under its own wording (App. A.3.2).

    python q_search.py --method qlass -M 4 --paraphrase                       # the rules below
    python q_search.py --method qlass -M 4 --paraphrase-server http://localhost:8000/v1      # a language model

For WebShop, as in the paper. Wording 0 is the original. The rules change the frame of the request ("i need", "find
me"), the order of its clauses and of its options, how options and price are put, and how units are written. Attributes,
option names and values, the kind of product and the amount stay as they are. A server is asked in our own words for
what the paper describes; nothing checks its answers, as nothing does in the paper.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException

from environments import UserError
from qlass.chat import State

from .catalogue import OPTION_CLAUSE, PRICE_CLAUSE


@dataclasses.dataclass(frozen=True)
class Reword:
    """A request for wording `index` of a task; 0 is the task itself."""

    task: str
    index: int


def reword(state: State, wording: str) -> State:
    """The state as it would be if its task had been put like this: in the user's messages, not in the agent's."""
    if wording == state.task:
        return state
    task = state.task.strip()
    said = ((role, text.replace(task, wording) if role == "user" else text) for role, text in state.messages)
    return State(tuple(said), wording)


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
    whole = task.strip()
    price = PRICE_CLAUSE.search(whole)
    whole = whole[: price.start()] if price else whole
    found = OPTION_CLAUSE.search(whole)
    listed = re.split(r", and (?=[^,:]+: )", found[0].removeprefix(" with ")) if found else []
    options = [tuple(option.split(": ", 1)) for option in listed]
    if any(re.search(r"\b(and|of|the)\b", name) for name, _ in options):  # a colon in somebody's own words
        found, options = None, []
    return whole[: found.start()] if found else whole, options, re.search(r"[\d.]+", price[0])[0] if price else ""


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
    said = (
        ", ".join(filter(None, order))
        for parts in itertools.product(dict.fromkeys(requests), chosen, limits)
        for order in itertools.permutations(parts)
    )
    distinct = [text for text in dict.fromkeys(said) if text != task]
    return random.Random(task).sample(distinct, len(distinct))


def paraphrase(task: str, index: int) -> str:
    """Wording `index` of a task: 0 the task itself; all are different until the rules have no more."""
    others = wordings(task) if index else []
    return others[(index - 1) % len(others)] if index else task


def by_rules(requests: list[Reword]) -> list[str]:
    """Answers to `Reword` requests."""
    return [paraphrase(r.task, r.index) for r in requests]


# -------------------------------------------------------------------------------------------------------------- server

PROMPT = (
    "Say the following shopping request in other words. Keep all that it asks for: the product, its attributes, each "
    "option with its value, numbers, units and the price limit. Answer with the new request alone, in one line.\n\n"
)


class Server:
    """An OpenAI-compatible chat server (vLLM, SGLang, llama.cpp, OpenAI) that answers `Reword` requests.

    url: its base, http://HOST:PORT/v1, with #MODEL where it serves several; $OPENAI_API_KEY is sent if set.
    """

    def __init__(self, url: str, timeout: float = 60, attempts: int = 3, pause: float = 1) -> None:
        self.url, _, self.model = url.partition("#")
        self.timeout, self.attempts, self.pause = timeout, attempts, pause
        self.tokens = 0  # read and written by the server, where it tells
        self.known: dict[Reword, str] = {}
        if not self.model:
            listed = self.call("/models").get("data") or [{}]
            self.model = listed[0].get("id", "")

    def call(self, path: str, body: dict | None = None) -> dict:
        """One exchange, tried again where the fault may pass; UserError where it does not."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        for attempt in range(self.attempts):
            try:
                request = urllib.request.Request(self.url.rstrip("/") + path, data, headers)
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                reason = f"{error.code} {error.reason}: {error.read(200).decode(errors='replace').strip()}"
                if error.code < 500 and error.code != 429:
                    break
            except (OSError, ValueError, HTTPException) as error:  # no connection, time out; no JSON; cut short
                reason = str(error)
            if attempt < self.attempts - 1:
                time.sleep(self.pause * 2**attempt)
        raise UserError(
            f"--paraphrase-server {self.url}{path}: {' '.join(reason.split())}; "
            "start an OpenAI-compatible server there, or use --paraphrase for the bundled rules"
        )

    def ask(self, request: Reword) -> tuple[str, int]:
        """The wording, and the tokens that it took."""
        tokens = 0
        for attempt in range(self.attempts):
            body = {
                "model": self.model, "messages": [{"role": "user", "content": PROMPT + request.task}],
                "temperature": 0.7, "max_tokens": 200, "seed": 1000 * request.index + attempt,
            }  # fmt: skip
            reply = self.call("/chat/completions", body)
            try:
                text = reply["choices"][0]["message"]["content"] or ""
            except (KeyError, IndexError, TypeError):
                raise UserError(f"--paraphrase-server {self.url}: no chat completion in its answer {reply}") from None
            tokens += (reply.get("usage") or {}).get("total_tokens", 0)
            if text := " ".join(text.split()).strip("\"' "):
                return text, tokens
        raise UserError(f"--paraphrase-server {self.url}: {self.model} has no words for {request.task!r}")

    def __call__(self, requests: list[Reword]) -> list[str]:
        """Answers to `Reword` requests, eight at a time; each is asked for once."""
        fresh = [r for r in dict.fromkeys(requests) if r.index and r not in self.known]
        with ThreadPoolExecutor(8) as pool:
            for request, (text, tokens) in zip(fresh, pool.map(self.ask, fresh), strict=True):
                self.known[request] = text
                self.tokens += tokens
        return [self.known[r] if r.index else r.task for r in requests]
