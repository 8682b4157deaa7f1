"""WebShop behind `envs.TextEnv`: its rules are engine.py's."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from data import make_webshop
from environments import writable
from qlass import UserError
from qlass.environment import Player, TextEnv, pick

from . import catalogue, earnings, engine, expert

TUNING = 400  # tasks


class WebShopEnv(TextEnv):
    """WebShop on its own files or on the bundled catalogue (see engine.py).

    data: folder with items_shuffle*, items_ins_v2*, items_human_ins (.json or .json.gz); None: the bundled catalogue,
    with its own page length and step limit. title_nouns: a recorded file, or spacy:MODEL, instead of a rule
    (words.noun_finder). cache: a folder for what is made of a large catalogue at its first start, where the one of its
    files can't be written (see store.py).
    human_goals: the instructions that people wrote. split_file: published splits by goal index; per_product: at most so
    many tasks of a product (both: catalogue.splits).
    Task i is goal i. Other splits are by product, so that none is in two of them. Of the bundled catalogue's test tasks
    TUNING are the split "tuning": the tiny preset was chosen on them too, so no row of results.csv is of them. They are
    other tasks than those of "test", but most are about the same products.
    """

    name, side_by_side = "webshop", 64
    prefix = "Observation:\n"
    max_steps, tree_steps, tree_depth = engine.MAX_STEPS, engine.MAX_STEPS, 3
    instruction = (
        "You are shopping on the web.\n"
        "You get an instruction that says what to buy, and have to follow it.\n"
        "Each turn shows you an observation, and you answer with one action that fits it and the instruction.\n"
        "Where the page has a search box you can search; otherwise you can click a button, a product or an option.\n"
        "An action has one of these two forms:\nsearch[keywords]\nclick[value]\n"
        "An action that is not valid changes nothing.\n"
        "The keywords are yours to choose, with care; the value of a click must stand on the page.\n"
        "Your response should use the following format:\n\nThought: I think ...\nAction: click[something]"
    )

    def __init__(
        self,
        data: str | Path | None = None,
        title_nouns: str | Path | None = None,
        human_goals: bool = False,
        split_file: str | Path | None = None,
        per_product: float = math.inf,
        cache: str | Path | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        own_tasks = data or seed or human_goals or split_file
        page_size = engine.PAGE_SIZE
        if data is None:
            self.max_steps = self.tree_steps = engine.BUNDLED_MAX_STEPS
            page_size = engine.BUNDLED_PAGE_SIZE
            data = make_webshop.ensure(seed, writable(make_webshop.GENERATED))
        cache = Path(cache) if cache else None
        self.shop = engine.load(Path(data), title_nouns, human_goals, seed, page_size, cache)
        tuning = 0 if own_tasks else TUNING
        self.splits = catalogue.splits(self.shop.owners, self.shop.shares, split_file, per_product, tuning)
        self.published = human_goals and split_file is not None

    @property
    def index(self) -> int:
        return int(self.task_id)

    @property
    def goal(self) -> dict:
        return self.shop.goals[self.index]

    @property
    def task(self) -> str:
        return self.goal["instruction_text"]

    @property
    def left(self) -> int:
        """Steps until the limit; where there is none, more than any episode takes."""
        return 10**6 if self.max_steps is None else self.max_steps - self.steps

    def page(self) -> str:
        """The page at hand without the instruction above it."""
        return self.shop.page(self.session).text

    def split_ids(self, split: str) -> list[str]:
        return [*map(str, pick(self.splits, split, "webshop: unknown split").tolist())]

    def published_id(self, record: dict) -> str | None:
        """ETO's ids are the numbers of people's goals, which are ours where its splits are given."""
        name = str(record.get("id"))
        return name if self.published and name.isdecimal() else None

    def canonical(self, action: str) -> str:
        name, value = engine.parse(action)
        if name == "search":  # which splits words at blanks
            value = " ".join(value.split()) or " "  # an empty search is none
        return f"{name}[{value}]" if name in ("search", "click") else action

    def subject(self, task_id: str) -> str:
        """The product that is right."""
        is_goal = task_id.isdecimal() and int(task_id) < len(self.shop.goals)
        return self.shop.goals[int(task_id)]["asin"] if is_goal else task_id

    def begin(self, task_id: str) -> str:
        if not task_id.isdecimal() or int(task_id) >= len(self.shop.goals):
            raise UserError(f"webshop: unknown task {task_id!r}: tasks are 0 to {len(self.shop.goals) - 1}")
        self.session = engine.Session()
        self.details = None
        return self.shop.text(self.session, self.index)

    def knows(self, action: str) -> bool:
        name, value = engine.parse(action)
        return name == "search" or (name == "click" and bool(self.shop.page(self.session).clickables.get(value)))

    def act(self, action: str) -> tuple[str, float, bool]:
        self.session, self.details = self.shop.act(self.session, self.index, action)
        bought = self.details is not None
        return self.shop.text(self.session, self.index), self.session.reward if bought else 0.0, bought

    def info(self) -> dict[str, Any]:
        bought = {"reward_details": self.details} if self.details else {}
        return super().info() | {"clickables": list(self.shop.page(self.session).clickables)} | bought

    def message(self, observation: str) -> str:
        """Without the reward, which the receipt states: no score of a step may read it there."""
        bought = observation.startswith(engine.THANKS[0])
        return super().message(observation.partition(" [SEP] Reward [SEP] ")[0] if bought else observation)

    def valid_actions(self) -> list[str]:
        return [action for _, action in self.candidates()]

    def candidates(self) -> list[tuple[str, str]]:
        if self.session.page == "start":
            return [("search for it", f"search[{query}]") for query in self.shop.queries(self.index)]
        return list(self.shop.page(self.session).candidates)

    def save(self) -> tuple:
        return self.session, self.details

    def load(self, saved: tuple) -> None:
        self.session, self.details = saved

    def optimal_value(self, gamma: float = 0.99) -> float:
        """The best discounted final reward within the steps that are left (earnings.value); for oracles only."""
        return earnings.value(self.shop, self.session, self.index, self.left, gamma)

    def expert(self, task_id: str) -> Player:
        return expert.read(self)

    def oracle(self, task_id: str) -> Player:
        return expert.know(self)

    def rules(self) -> dict[str, Callable[[], Player]]:
        return {name: partial(expert.rule, self, worth) for name, worth in expert.RULES.items()}
