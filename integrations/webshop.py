"""WebShop's own class on our engine: a loop written for `web_agent_site` runs with the import changed.

It answers as princeton-nlp/WebShop at 64fa2a5 in text mode. It leaves out `state`, a page's address and html. `seed`
draws the prices, which in the original differ from process to process.
"""

from __future__ import annotations

import itertools
import random
import string
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium

from data import make_webshop
from environments import writable
from environments.webshop import engine
from environments.webshop.store import Lazy
from qlass import UserError

ONLY = {"observation_mode": "text", "filter_goals": None, "limit_goals": -1, "show_attrs": False, "get_image": 0}
ONLY |= {"num_prev_obs": 0, "num_prev_actions": 0}


class SimServer:
    """A shop, its goals, and a dictionary per session. Its random numbers are its own."""

    def __init__(self, file_path: str | Path | None, human_goals: bool = False, **options: Any) -> None:
        path = Path(file_path or make_webshop.ensure(0, writable(make_webshop.GENERATED)))
        self.shop = engine.load(path, use_human_goals=bool(human_goals), **options)
        goals = self.shop.goals
        self.weights = [1] * len(goals) if human_goals else rarity(goals)
        self.goals = Lazy(len(goals), self.goal)
        self.cum_weights = [0, *itertools.accumulate(self.weights)]
        self.rng = random.Random(233)
        self.rng.shuffle([*goals])  # the original's generator has shuffled them before it draws one
        self.user_sessions: dict[str, dict[str, Any]] = {}

    def goal(self, number: int) -> dict[str, Any]:
        return self.shop.goals[number] | {"weight": self.weights[number]}

    def draw(self) -> int:
        """The original's draw by weight, which never takes the first goal."""
        (place,) = self.rng.choices(range(len(self.cum_weights)), cum_weights=self.cum_weights)
        return min(place, len(self.goals) - 1)


def rarity(goals: Any) -> list[float]:
    """Of each goal the mean of 1 / n over its attributes, where n goals have the attribute."""
    attributes = [goal["attributes"] for goal in goals]
    counts = Counter(itertools.chain(*attributes))
    weights = []
    for names in attributes:
        shares = [1 / counts[name] for name in names]
        weights.append(sum(shares) / len(shares))
    return weights


class WebAgentTextEnv(gymnasium.Env):
    """file_path: WebShop's folder, or a file of products in it; None: the bundled catalogue. server: that of another
    environment, to share its sessions. kwargs: SimServer's, and goals, title_nouns and seed of engine.Shop."""

    def __init__(self, observation_mode: str = "html", file_path: Any = None, server: Any = None, **kwargs) -> None:
        options = {"observation_mode": observation_mode, **kwargs}
        for name, only in ONLY.items():
            value = options.pop(name, only)
            if value != only:
                raise UserError(f"webshop: {name}={value!r} is not supported: choose {only!r}")
        self.observation_mode = observation_mode
        self.file_path = file_path
        self.kwargs = kwargs
        self.session_prefix = options.pop("session_prefix", None)
        options.pop("session", None)  # which has no effect in the original either
        self.server = SimServer(file_path, **options) if server is None else server
        self.reset()

    def reset(self, session: int | str | None = None, instruction_text: str | None = None) -> tuple[str, None]:
        """Begin a session. A name that is new gets a goal, which it keeps: a number that of this number."""
        server = self.server
        name = str(session)
        if session is None:
            name = "".join(server.rng.choices(string.ascii_lowercase, k=10))
        self.session = (self.session_prefix or "") + name
        if self.session not in server.user_sessions:
            number = server.draw() if isinstance(session, str | None) else session
            fields = {"goal": server.goals[number], "number": number, "done": False}
            server.user_sessions[self.session] = fields
        self.goal = server.user_sessions[self.session]["number"]
        self.place = engine.Session()
        self._record()
        self.instruction_text = self.get_instruction_text() if instruction_text is None else instruction_text
        return self.observation, None

    def step(self, action: str) -> tuple[str, float, bool, None]:
        """Observation, reward, done, None. What is not valid changes nothing; a shop stays open after a purchase."""
        self.place, details = self.server.shop.act(self.place, self.goal, action)
        self._record(details)
        done = details is not None
        return self.observation, self.place.reward if done else 0.0, done, None

    def _record(self, details: dict[str, Any] | None = None) -> None:
        """Put what an action led to into the session's dictionary."""
        place = self.place
        session = self.server.user_sessions[self.session]
        session.update(keywords=None, page=None, asin=None, options={})
        if place.page == "start":
            return
        if place.page != "results":
            session["asin"] = self.server.shop.products[place.product].asin
        session.update(keywords=place.query.split(" "), page=place.number, options=dict(place.options))
        if details is not None:
            parts = {name: value for name, value in details.items() if "option" not in name or details["w_option"]}
            session.update(verbose_info=parts, done=True, reward=place.reward)

    @property
    def observation(self) -> str:
        return self.server.shop.text(self.place, self.goal)

    def get_available_actions(self) -> dict[str, Any]:
        clickables = list(self.server.shop.page(self.place).clickables)
        return {"has_search_bar": self.place.page == "start", "clickables": clickables}

    def get_instruction_text(self) -> str:
        """As the heading of the page has it; also after a purchase, where the original fails."""
        colon = ": " if self.place.page == "start" else ":"
        return f"Instruction{colon}{self.server.goals[self.goal]['instruction_text']}"


gymnasium.register("WebAgentTextEnv-v0", WebAgentTextEnv, order_enforce=False, disable_env_checker=True)
