"""The WebShop engine: catalogue, goals, pages, actions and reward of Yao et al. (2022, arXiv 2207.01206).

    shop = load(folder)                                              # one for all environments of the same arguments
    session, details = shop.act(Session(), 0, "search[red shirt]")   # goal 0; details: the reward's parts, once bought
    print(shop.text(session, 0), shop.page(session).clickables)      # a session is immutable: its own snapshot

It answers page for page like the original (princeton-nlp/WebShop, text mode) without its Java, faiss, spaCy and web
server. Kept from it: goals and their order, search results, clickables and their order, what is a no-op, the reward.
Left out: images, reviews (the original never loads them), `show_attrs`, and the special first search words <r> <a> <c>
<q>, which are plain words here. A reset without a task takes any training goal, not one by its weight.
"""

import json
import re
import textwrap
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from qlass import UserError

from .catalogue import Product, queries
from .store import open_store
from .words import noun_finder, plain_color, similar

PAGE_SIZE = 10  # products on a results page
MAX_STEPS = 5  # the paper's step limit
BUNDLED_PAGE_SIZE, BUNDLED_MAX_STEPS = 4, 17  # the bundled catalogue's own: short pages, and steps to read them
SEP = " [SEP] "


# -------------------------------------------------------------------------------------------------- pages and actions
ACTION = re.compile(r"(.+)\[(.+)\]")


@lru_cache(1 << 14)
def parse(action: str) -> tuple[str, str]:
    """(name, lower-cased argument) of `name[argument]`; what follows the last bracket is ignored. No such form: ""s."""
    match = ACTION.match(action)
    return (match[1], match[2].lower()) if match else ("", "")


class Session(NamedTuple):
    """The place of a shopper."""

    page: str = "start"  # start, results, item, description, features, reviews, done
    query: str = ""
    number: int = 1  # of the results page
    product: int = -1  # position in the catalogue
    options: tuple[tuple[str, str], ...] = ()  # (name, value) as chosen
    reward: float = 0.0  # of the purchase, shown on the last page


class Page(NamedTuple):
    """A page without its instruction; `clickables`: key -> the fields of Session that a click on it sets."""

    text: str
    clickables: dict[str, dict[str, Any]]
    candidates: tuple[tuple[str, str], ...]  # (what the page says of the key, click[key])


BUTTONS = {
    "back to search": "search again",
    "< prev": "go back",
    "next >": "see more",
    "description": "read the description",
    "features": "read the features",
    "reviews": "read the reviews",
    "buy now": "buy it",
}


def make_page(nodes: list[str], clickables: dict[str, dict[str, Any]], says: dict[str, str] | None = None) -> Page:
    """nodes: the texts of the page, from the top. says: of the keys that are no BUTTONS."""
    says = BUTTONS | (says or {})
    candidates = []
    for key in clickables:
        action = f"click[{key}]"
        # A key that `parse` would not give back (a value with brackets) can't be clicked, in the original neither.
        if key != "search" and parse(action) == ("click", key):
            candidates.append((says[key], action))
    # As a browser's text mode lists them: an empty node is none, one of blanks alone is an empty entry.
    text = SEP.join(node.strip() for node in nodes if node and (node.strip() or "\n" not in node))
    return Page(text, clickables, tuple(candidates))


BACK = {"back to search": Session()._asdict()}
ITEM_BUTTONS = {
    **BACK,
    "< prev": {"page": "results", "options": ()},
    "description": {"page": "description"},
    "features": {"page": "features"},
    "reviews": {"page": "reviews"},
    "buy now": {"page": "done"},
}
START = make_page(["WebShop", "Instruction:", "", "Search"], {"search": {}})
THANKS = ["Thank you for shopping with us!", "Your code:", "None", "(Paste it in your MTurk interface.)", "Purchased"]
RECEIPT = (
    "attrs|None|category|None|query|None|product category|None|Target|asin|options|attrs|price upper|"
    "instuction text|category|product category|query|Goal|None|Reward|Your score (min 0.0, max 1.0)"
)


MEMOISED = {"search": 14, "queries": 14, "results": 12, "item": 14, "nouns": 16, "match": 18}  # 2 ** so many answers


class Shop:
    """A catalogue with its search index, goals and memoised pages; holds no session, so environments share it."""

    def __init__(
        self,
        folder: Path,
        title_nouns: str | Path | None = None,  # of words.noun_finder
        use_human_goals: bool = False,
        seed: int = 0,
        page_size: int = PAGE_SIZE,
        cache: Path | None = None,
    ) -> None:
        kind = "human" if use_human_goals else "synthetic"
        store = open_store(folder, kind, seed, cache)
        self.products, self.position, self.prices = store.products, store.position, store.prices
        self.goals, self.owners, self.shares = store.goals, store.owners, store.shares
        self.by_asin, self.index, self.page_size = store.by_asin, store.index, page_size
        if store.error:
            raise UserError(f"{folder}: {store.error}")
        if not self.goals:
            raise UserError(f"{folder}: no goals; the catalogue has no instructions of the kind asked for")
        own = folder / "title_nouns.json"  # the bundled catalogue has one
        if title_nouns is None and own.exists():
            title_nouns = own
        self.find_nouns = noun_finder(title_nouns)
        for name, size in MEMOISED.items():
            setattr(self, name, lru_cache(1 << size)(getattr(self, name)))

    def search(self, query: str) -> tuple[int, ...]:
        """The positions of at most 50 products, best first."""
        return tuple(self.by_asin[self.index.top(query)[0]].tolist())

    def queries(self, goal: int) -> list[str]:
        return queries(self.goals[goal]["instruction_text"])

    # ---------------------------------------------------------------------------------------------------- pages
    def page(self, session: Session) -> Page:
        match session.page:
            case "start":
                return START
            case "results":
                return self.results(session.query, session.number)
            case "item":
                return self.item(session.product)
            case "done":
                return self.done(session)
        return self.sub_page(session.product, session.page)

    def text(self, session: Session, goal: int) -> str:
        """The observation: the page's text below the instruction."""
        body = self.page(session).text
        if session.page == "done":
            return body
        instruction = self.goals[goal]["instruction_text"].strip()
        if session.page == "start":
            return SEP.join(["WebShop", "Instruction:", instruction, "Search"])
        return SEP.join(["Instruction:", instruction, body])

    def results(self, query: str, number: int) -> Page:
        hits = self.search(query)
        nodes = ["Back to Search", f"Page {number} (Total results: {len(hits)})"]
        clickables: dict[str, dict[str, Any]] = {**BACK}
        if number > 1:
            nodes.append("< Prev")
            clickables["< prev"] = {"number": number - 1}
        nodes.append("Next >")
        clickables["next >"] = {"number": number + 1}
        says = {}
        first = (number - 1) * self.page_size
        for place, i in enumerate(hits[first : first + self.page_size], 1):
            product = self.products[i]
            key = product.asin.lower()
            nodes += [product.asin, product.title, product.price_tag]
            clickables[key] = {"page": "item", "product": i}
            title = textwrap.shorten(product.title, 60, placeholder=" ...")
            says[key] = f"{place} {product.price_tag} {title}"
        return make_page(nodes, clickables, says)

    def item(self, i: int) -> Page:
        product = self.products[i]
        nodes = ["Back to Search", "< Prev"]
        clickables: dict[str, dict[str, Any]] = {**ITEM_BUTTONS}
        says = {}
        for name, values in product.options.items():
            nodes += [name, *values]
            for value in values:
                if value not in ITEM_BUTTONS:
                    clickables[value] = {"option": (name, value)}  # of two options with this value the later one's
                    says[value] = f"{name} {value}"
        nodes += [product.title, f"Price: {product.price_tag}", "Rating: N.A."]
        nodes += ["Description", "Features", "Reviews", "Buy Now"]
        return make_page(nodes, clickables, says)

    def sub_page(self, i: int, kind: str) -> Page:
        product = self.products[i]
        bullets = [f" {bullet}" for bullet in product.bullets]  # the blank makes a text node of an empty bullet too
        body = {"description": [product.description], "features": bullets, "reviews": []}[kind]
        return make_page(["Back to Search", "< Prev", *body], BACK | {"< prev": {"page": "item"}})

    def done(self, session: Session) -> Page:
        options = json.dumps(dict(session.options), sort_keys=True)
        for char in "<>&'":
            options = options.replace(char, f"\\u{ord(char):04x}")
        bought = [*THANKS, "asin", self.products[session.product].asin, "options", options]
        return make_page([*bought, *RECEIPT.split("|"), str(session.reward), "Reward Details", "None"], {})

    # -------------------------------------------------------------------------------------------------- actions
    def act(self, session: Session, goal: int, action: str) -> tuple[Session, dict[str, Any] | None]:
        """The session after an action, and the reward's parts if it was a purchase; what is not valid is a no-op."""
        name, argument = parse(action)
        if name == "search":  # works on every page
            return Session("results", argument), None
        if name != "click":
            return session, None
        change = self.page(session).clickables.get(argument)
        if not change or argument == "search":  # nor is an option of this name
            return session, None
        if "option" in change:
            option, value = change["option"]
            options = {**dict(session.options), option: value}
            return session._replace(options=tuple(options.items())), None
        if change.get("page") == "done":
            values = tuple(value for _, value in session.options)
            reward, details = self.score(goal, session.product, values)
            return session._replace(page="done", reward=reward), details
        return session._replace(**change), None

    # --------------------------------------------------------------------------------------------------- reward
    def nouns(self, i: int) -> list[str]:
        return self.find_nouns(self.products[i])

    def match(self, goal: int, i: int) -> dict[str, Any]:
        """The parts of the reward that do not depend on the options: type, attributes, price."""
        wanted, product = self.goals[goal], self.products[i]
        titles = self.nouns(self.position(wanted["asin"])), self.nouns(i)
        title_score = len(set(titles[0]) & set(titles[1])) / len(titles[0]) if titles[0] else 0.2
        query_match = product.query == wanted["query"]
        crumbs, wanted_crumbs = crumbs_of(product.breadcrumb), crumbs_of(wanted["product_category"])
        category_match = len(crumbs & wanted_crumbs) >= 2
        texts = [text.lower() for text in (product.title, " ".join(product.bullets), product.description)]
        if title_score < 0.1:
            r_type = 0.1 if title_score else 0.0
        else:
            r_type = 1.0 if query_match or category_match or title_score > 0.2 else 0.5
        return {
            "r_type": r_type,
            "title_score": title_score,
            "query_match": query_match,
            "category_match": category_match,
            "n_att": sum(has_attribute(product, texts, attribute) for attribute in wanted["attributes"]),
            "r_price": self.prices[i] <= wanted["price_upper"],
        }

    def wanted_options(self, goal: int) -> list[Any]:
        """Goal options as the reward compares them: (name, value) pairs of a synthetic goal, values of a human one."""
        options = self.goals[goal]["goal_options"]
        wanted = options.items() if isinstance(options, dict) else options
        return [plain_color(option) for option in wanted]

    def reward(self, goal: int, i: int, n_option: int) -> float:
        wanted, parts = self.goals[goal], self.match(goal, i)
        total = len(wanted["attributes"]) + len(wanted["goal_options"]) + 1
        return (parts["n_att"] + n_option + parts["r_price"]) / total * parts["r_type"]

    def score(self, goal: int, i: int, options: tuple[str, ...]) -> tuple[float, dict[str, Any]]:
        """The reward in [0, 1] for buying product i with these option values, and its parts (r_*: got, w_*: weight)."""
        values = [plain_color(value) for value in options]
        wanted = self.wanted_options(goal)
        n_option = sum(any(similar(value, option) for value in values) for option in wanted)
        n_attributes = len(self.goals[goal]["attributes"])
        total = n_attributes + len(wanted) + 1
        parts = dict(self.match(goal, i))
        parts |= {
            "r_att": parts.pop("n_att") / n_attributes,
            "w_att": n_attributes / total,
            "r_option": n_option / len(wanted) if wanted else None,
            "w_option": len(wanted) / total,
            "w_price": 1 / total,
        }
        return self.reward(goal, i, n_option), parts


def crumbs_of(category: str) -> set[str]:
    return {crumb.strip() for crumb in category.split("›")}


def has_attribute(product: Product, texts: list[str], attribute: str) -> bool:
    """True if one of the product's own attributes is like this one, or one of its texts, in small letters, has it."""
    return any(similar(own, attribute) for own in product.attributes) or any(attribute in text for text in texts)


load = lru_cache(maxsize=8)(Shop)  # built once for the same arguments
