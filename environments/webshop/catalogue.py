"""WebShop's data: products, prices, goals and splits, from the original's own files.

items_shuffle*.json products, items_ins_v2*.json attributes and generated instructions, items_human_ins.json those that
people wrote; each as .json or .json.gz. What is sampled (prices, price limits) comes from the seed as in the original.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import random
import re
import zlib
from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments import split_files
from qlass import UserError


# -------------------------------------------------------------------------------------------------------- catalogue
@dataclass(frozen=True, slots=True)
class Product:
    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    prices: tuple[float, ...]  # dollars: one price, or the ends of a range
    options: dict[str, tuple[str, ...]]  # name -> values, in the order of the page
    attributes: tuple[str, ...]
    query: str
    category: str
    breadcrumb: str

    @property
    def price_tag(self) -> str:
        return " to ".join(f"${price}" for price in self.prices)

    @property
    def document(self) -> str:
        """The text that search reads: of the bullets only the first, and no attributes."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join([self.title, self.description, *self.bullets[:1], options])


def find(folder: Path, *stems: str) -> Path:
    """The first of the files that is there, as .json or .json.gz."""
    names = [stem + suffix for stem in stems for suffix in (".json", ".json.gz")]
    for path in (folder / name for name in names):
        if path.exists():
            return path
    raise UserError(f"{folder}: found none of {', '.join(names)}; name a folder with WebShop's data files")


def read_json(path: Path) -> Any:
    """A .json or .json.gz file; raises UserError with the line where it is malformed."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
            return json.load(file)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON ({error.msg})") from None
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise UserError(f"{path}: can't be read ({error})") from None


def load_products(
    folder: Path, num_products: int | None = None
) -> tuple[list[Product], dict[str, dict], dict[str, list[dict]]]:
    """Products in file order, and by asin the synthetic and the human instructions; cleaned as the original does.

    A folder that holds both the 1,000 products and the full catalogue gives the former. num_products: the first of the
    file, as the original counts them: before cleaning.
    """
    path = find(folder, "items_shuffle_1000", "items_shuffle")
    few = ["items_ins_v2_1000"] if "_1000" in path.name else []  # which lack most products of the full catalogue
    if few and any(folder.glob("items_shuffle.json*")):
        print(f"note: {folder}: of its two catalogues that of 1,000 products: move its files away for the other")
    synthetic = read_json(find(folder, *few, "items_ins_v2"))
    human = read_json(find(folder, "items_human_ins"))
    records = read_json(path)
    if not (isinstance(records, list) and isinstance(synthetic, dict) and isinstance(human, dict)):
        raise UserError(f"{folder}: a list of products and two objects of instructions by asin are expected")
    products: dict[str, Product] = {}
    for number, record in enumerate(records[:num_products]):
        try:
            asin = record["asin"]
            if asin != "nan" and len(asin) <= 10 and asin not in products:
                products[asin] = clean(record, synthetic.get(asin, {}).get("attributes", ["DUMMY_ATTR"]))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            message = f"{path}: product number {number} is not in WebShop's schema ({error!r})"
            raise UserError(message) from None
    return list(products.values()), synthetic, human


def clean(record: dict, attributes: list[str]) -> Product:
    bullets = record["small_description"]
    pieces = (record.get("pricing") or "").split("$")  # what stands before the first "$" is no price
    digits = [re.sub(r"[^\d.]", "", piece) for piece in pieces[1:] or pieces]
    options = {
        name.lower(): tuple(value["value"].strip().replace("/", " | ").lower() for value in values)
        for name, values in (record["customization_options"] or {}).items()
        if values is not None
    }
    texts = (record["name"], record["full_description"], record["category"], record["product_category"])
    bullets = tuple(bullets) if isinstance(bullets, list) else (bullets,)
    if wrong := [text for text in (*texts, *bullets, *attributes) if not isinstance(text, str)]:
        raise TypeError(f"{wrong[0]!r} where text is expected")
    return Product(
        asin=record["asin"],
        title=record["name"],
        description=record["full_description"],
        bullets=bullets,
        prices=tuple(float(d) for d in digits if d)[:2] or (100.0,),
        options=options,
        attributes=tuple(attributes),
        query=record["query"].lower().strip(),
        category=record["category"],
        breadcrumb=record["product_category"],
    )


# ------------------------------------------------------------------------------------------------------------ goals
def draw_prices(products: list[Product], rng: random.Random) -> dict[str, float]:
    """One price per product, in catalogue order; it decides `r_price` and is never shown."""
    return {p.asin: p.prices[0] if len(p.prices) == 1 else rng.uniform(*p.prices) for p in products}


def draw_limit(price: float, rng: random.Random) -> tuple[float, str]:
    """A price limit above the price, and the words that tell it."""
    above = [10.0 * i for i in range(1, 100) if 10.0 * i > price][:4]
    if len(above) < 2:
        return 1_000_000, ""
    limit = max(rng.sample(above, 2))
    return limit, f", and price lower than {limit:.2f} dollars"


def make_goal(product: Product, text: str, attributes: list[str], options: dict | list, limit: float) -> dict:
    if wrong := [word for word in (text, *attributes, *options) if not isinstance(word, str)]:
        raise TypeError(f"{wrong[0]!r} where text is expected")
    return {
        "asin": product.asin,
        "category": product.category,
        "query": product.query,
        "name": product.title,
        "product_category": product.breadcrumb,
        "instruction_text": text,
        "attributes": attributes,
        "price_upper": limit,
        "goal_options": options,
    }


def synthetic_goals(products: list[Product], instructions: dict, prices: dict, rng: random.Random) -> list[dict]:
    """One goal for every choice of options of every product that has a generated instruction."""
    goals = []
    for product in products:
        record = instructions.get(product.asin, {})
        if not record.get("instruction") or not record.get("instruction_attributes"):
            continue
        limit, price_text = draw_limit(prices[product.asin], rng)
        names = sorted(product.options)
        for values in itertools.product(*(product.options[name] for name in names)):
            options = dict(zip(names, values, strict=True))
            with_options = " with " + ", and ".join(f"{k}: {v}" for k, v in options.items()) if options else ""
            text = record["instruction"] + with_options + price_text
            goals.append(make_goal(product, text, record["instruction_attributes"], options, limit))
    return goals


def human_goals(products: list[Product], instructions: dict, prices: dict, rng: random.Random) -> list[dict]:
    """One goal for every instruction that a person wrote; its options are values without names."""
    goals = []
    for product in products:
        for record in instructions.get(product.asin, []):
            if record["instruction_attributes"]:
                limit, price_text = draw_limit(prices[product.asin], rng)
                text = record["instruction"].strip(".") + price_text
                goals.append(
                    make_goal(product, text, record["instruction_attributes"], record["instruction_options"], limit)
                )
    return goals


GOAL_FIELDS: dict[str, Any] = {"asin": str, "name": str, "query": str, "product_category": str, "instruction_text": str}
GOAL_FIELDS |= {"attributes": list, "goal_options": (list, dict), "price_upper": (int, float)}


def read_goals(path: Path, asins: Container[str]) -> tuple[list[dict], dict[str, float]]:
    """Recorded goals in their order, and the prices sampled with them: {"goals": [...], "prices": {asin: dollars}}."""
    content = read_json(path)
    goals, prices = (content.get("goals"), content.get("prices", {})) if isinstance(content, dict) else (content, {})
    numbers = isinstance(prices, dict) and all(isinstance(price, int | float) for price in prices.values())
    if not isinstance(goals, list) or not numbers:
        raise UserError(f'{path}: {{"goals": [...], "prices": {{asin: dollars}}}} is expected')
    for number, goal in enumerate(goals):
        if not isinstance(goal, dict):
            raise UserError(f"{path}: goal {number} is not a JSON object")
        if lacking := [field for field in GOAL_FIELDS if field not in goal]:
            raise UserError(f"{path}: goal {number} lacks {', '.join(lacking)}")
        wrong = [field for field, kind in GOAL_FIELDS.items() if not isinstance(goal[field], kind)]
        words = [] if wrong else ["attributes", "goal_options"]
        wrong += [field for field in words if not all(isinstance(word, str) for word in goal[field])]
        if wrong or not goal["attributes"]:
            raise UserError(f"{path}: goal {number}: {', '.join(wrong) or 'attributes'} not in WebShop's schema")
        if goal["asin"] not in asins:
            raise UserError(f"{path}: product {goal['asin']} of goal {number} is not in this catalogue")
    return goals, prices


PRICE_CLAUSE = re.compile(r",? and price lower than [\d.]+ dollars$")
OPTION_CLAUSE = re.compile(r" with (?:(?! with )[^,:])+: .*$")
OPENING = re.compile(
    r"^(find me|show me|i am looking for|i'm looking for|i would like|i need|i want|looking for)( an?)? ", re.I
)


def without_price(instruction: str) -> str:
    return PRICE_CLAUSE.sub("", instruction.strip())


def described(instruction: str) -> str:
    """What is wanted: neither the price nor "i need a"."""
    return OPENING.sub("", without_price(instruction))


def price_limit(instruction: str) -> float:
    """In dollars; infinite where the instruction has none."""
    clause = PRICE_CLAUSE.search(instruction.strip())
    return float(clause[0].split()[-2]) if clause else math.inf


def queries(instruction: str) -> list[str]:
    """Searches that the instruction suggests, for candidates of tiny models: all but its price, the best by far, as
    search weighs words by how rare they are; that without "i need a"; and without the options."""
    core = described(instruction)
    suggested = (without_price(instruction), core, OPTION_CLAUSE.sub("", core))
    return list(dict.fromkeys(query for query in suggested if query))


# ----------------------------------------------------------------------------------------------------------- splits
def splits(
    goals: list[dict], published: str | Path | dict[str, str] | None = None, per_product: float = math.inf
) -> dict[str, list[int]]:
    """Split name -> indices of goals; "all" is always there.

    By default train, val and test: 70, 10 and 20 % of the *products*, by a hash of the asin, so that a product stays in
    its split whatever the seed. Published ones: {name: file}, a file, or a folder with NAME_indices*.json (as ETO's);
    a file is a JSON list of goal indices, and one that comes twice counts once.

    per_product: of each product a split keeps so many goals, the first ones. A product has a synthetic goal for each of
    its combinations of options, so that without a limit a few products are most of the tasks.
    """

    if per_product < 1:
        raise UserError(f"webshop: per_product={per_product}: at least one goal of a product is needed")

    def few(indices: Iterable[int]) -> list[int]:
        nth = defaultdict(itertools.count)
        return [i for i in indices if next(nth[goals[i]["asin"]]) < per_product]

    everything = range(len(goals))
    if published is None:
        share = [zlib.crc32(goal["asin"].encode()) % 100 for goal in goals]
        bounds = {"train": range(70), "val": range(70, 80), "test": range(80, 100), "all": range(100)}
        return {name: few(i for i in everything if share[i] in bound) for name, bound in bounds.items()}
    published = published if isinstance(published, dict) else split_files(published)
    splits_by_name = {}
    for name, file in published.items():
        indices = read_json(Path(file))
        if not isinstance(indices, list) or not all(type(i) is int for i in indices):
            raise UserError(f"{file}: a JSON list of integers is expected")
        if beyond := [i for i in indices if i not in everything]:
            raise UserError(
                f"{file}: index {beyond[0]}, but there are only {len(goals)} goals; take the catalogue it is for"
            )
        splits_by_name[name] = few(dict.fromkeys(indices))
    return splits_by_name | {"all": few(everything)}
