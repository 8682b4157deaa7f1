"""WebShop's own class on our engine: a loop written for `web_agent_site` runs with the import changed.

It answers as princeton-nlp/WebShop at 64fa2a5 in text mode. Other modes (html, text_rich, url), images, attribute pages
and earlier observations are refused. `seed` draws the prices, which in the original differ from process to process.
"""

from __future__ import annotations

import bisect
import itertools
import random
import string
from collections import Counter
from numbers import Integral
from pathlib import Path
from typing import Any

from data import make_webshop
from environments import writable
from environments.webshop import engine
from qlass import UserError


class SimServer:
    """A shop, its goals, and the goal of each session. Its random numbers are its own."""

    def __init__(
        self, file_path: str | Path | None, num_products: int | None = None, human_goals: bool = False, **options: Any
    ) -> None:
        path = Path(file_path or make_webshop.ensure(0, writable(make_webshop.GENERATED)))
        options |= {"use_human_goals": bool(human_goals), "num_products": num_products}
        self.shop = engine.load(path if path.is_dir() else path.parent, **options)
        goals = self.shop.goals
        counts = Counter(attribute for goal in goals for attribute in goal["attributes"])
        rarity = ([1 / counts[attribute] for attribute in goal["attributes"]] for goal in goals)
        weights = [1] * len(goals) if human_goals else [sum(shares) / len(shares) for shares in rarity]
        self.goals, self.cum_weights = goals, [0, *itertools.accumulate(weights)]
        self.rng = random.Random(233)
        self.rng.shuffle([*goals])  # the original's generator has shuffled them before it draws one
        self.user_sessions: dict[str, int] = {}  # name -> number of the goal

    def draw(self) -> int:
        """The original's draw by weight, which never takes the first goal."""
        place = bisect.bisect(self.cum_weights, self.rng.uniform(0, self.cum_weights[-1]))
        return min(place, len(self.goals) - 1)


class WebAgentTextEnv:
    """file_path: WebShop's folder, or its file of products; None: the bundled catalogue. server: that of another
    environment, to share its sessions. options: SimServer's, and goals, title_nouns and seed of engine.Shop."""

    def __init__(
        self, observation_mode: str = "html", file_path: str | Path | None = None, server: Any = None, **options: Any
    ) -> None:
        if observation_mode != "text":
            raise UserError(f"webshop: observation_mode={observation_mode!r} is not supported: choose 'text'")
        self.session_prefix = options.pop("session_prefix", None) or ""
        self.server = server or SimServer(file_path, **options)
        self.reset()

    def reset(self, session: int | str | None = None) -> tuple[str, None]:
        """Begin a session. A name that is new gets a goal, which it keeps: a number that of this number."""
        server = self.server
        name = "".join(server.rng.choices(string.ascii_lowercase, k=10)) if session is None else str(session)
        self.session = self.session_prefix + name
        if self.session not in server.user_sessions:
            server.user_sessions[self.session] = session if isinstance(session, Integral) else server.draw()
        self.goal, self.place = server.user_sessions[self.session], engine.Session()
        return self.observation, None

    def step(self, action: str) -> tuple[str, float, bool, None]:
        """Observation, reward, done, None. What is not valid changes nothing; a shop stays open after a purchase."""
        self.place, details = self.server.shop.act(self.place, self.goal, action)
        return self.observation, 0.0 if details is None else self.place.reward, details is not None, None

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

    def close(self) -> None:
        """Nothing is open."""
