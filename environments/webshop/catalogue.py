"""WebShop's data: products, goals and splits, from the original's own files.

items_shuffle*.json products, items_ins_v2*.json attributes and generated instructions, items_human_ins.json those that
people wrote; each as .json or .json.gz. What is sampled (prices, price limits) comes from the seed as in the original.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import math
import random
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from environments import WHERE
from environments.protocols import published_splits
from qlass import UserError
from qlass.environment import fair_order


# -------------------------------------------------------------------------------------------------------- catalogue
@dataclass(frozen=True, slots=True)
class Product:
    asin: str
    title: str
    description: str
    bullets: list[str]
    prices: list[float]  # dollars: one price, or the ends of a range
    options: dict[str, list[str]]  # name -> values, in the order of the page
    attributes: list[str]
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
    raise UserError(f"{folder}: found none of {', '.join(names)}; name a folder that has them {WHERE}")


BROKEN = (OSError, EOFError, ValueError, RecursionError, zlib.error)  # what a reader of damaged files may raise


def read_json(path: Path) -> Any:
    """A .json or .json.gz file."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
            return json.load(file)
    except BROKEN as error:
        raise UserError(f"{path}: can't be read ({error})") from None


def sources(folder: Path) -> tuple[Path, Path, Path]:
    """The files of products, of synthetic and of human instructions, in a folder.

    A folder that holds both the 1,000 products and the full catalogue gives the former.
    """
    path = find(folder, "items_shuffle_1000", "items_shuffle")
    few = ["items_ins_v2_1000"] if "_1000" in path.name else []  # which lack most products of the full catalogue
    if few and any(folder.glob("items_shuffle.json*")):
        print(f"note: {folder}: of its two catalogues that of 1,000 products: move its files away for the other")
    return path, find(path.parent, *few, "items_ins_v2"), find(path.parent, "items_human_ins")


SPACE, NEXT = re.compile(r"\s*"), re.compile(r"\s*([,\]])")
CHUNK, LONGEST = 1 << 22, 1 << 26  # characters: read at once; a record's, at most


def stream(path: Path, quiet: bool = False) -> Iterator[Any]:
    """The values of a JSON list, one at a time, under a progress bar."""
    decode, every = json.JSONDecoder().raw_decode, 0.1 if sys.stderr.isatty() else 30
    title, size = f"reading {path.name}", path.stat().st_size
    with (
        open(path, "rb") as raw,
        gzip.open(raw) if path.suffix == ".gz" else contextlib.nullcontext(raw) as unzipped,
        tqdm(None, title, size, unit="B", unit_scale=True, mininterval=every, disable=quiet) as bar,
    ):
        file = io.TextIOWrapper(unzipped, encoding="utf-8")
        try:
            text, at, separator = file.read(CHUNK).lstrip(), 1, "["
            if not text.startswith("["):
                raise UserError(f"{path}: a list of products is expected")
            while separator != "]":
                at = SPACE.match(text, at).end()
                if separator == "[" and text.startswith("]", at):
                    at += 1
                    break
                try:
                    value, end = decode(text, at)
                    mark = NEXT.match(text, end)
                except json.JSONDecodeError:
                    mark = None
                if mark:
                    yield value
                    at, separator = mark.end(), mark[1]
                    continue
                bar.update(raw.tell() - bar.n)  # what is not valid may be cut: read on
                more = file.read(CHUNK)
                if not more or len(text) - at > LONGEST:
                    raise UserError(f"{path}: not valid JSON at {text[at : at + 60]!r}")
                text, at = text[at:] + more, 0
            if text[at:].strip() or file.read().strip():
                raise UserError(f"{path}: not valid JSON (something stands behind the list)")
        except BROKEN as error:
            raise UserError(f"{path}: can't be read ({error})") from None


def clean(record: dict, attributes: list[str]) -> Product:
    bullets = record["small_description"]
    pieces = (record.get("pricing") or "").split("$")  # what stands before the first "$" is no price
    digits = [re.sub(r"[^\d.]", "", piece) for piece in pieces[1:] or pieces]
    options = {}
    for name, values in (record["customization_options"] or {}).items():
        if values is not None:
            options[name.lower()] = [value["value"].strip().replace("/", " | ").lower() for value in values]
    return Product(
        asin=record["asin"],
        title=record["name"],
        description=record["full_description"],
        bullets=bullets if isinstance(bullets, list) else [bullets],
        prices=[float(number) for number in digits if number][:2] or [100.0],
        options=options,
        attributes=attributes,
        query=record["query"].lower().strip(),
        category=record["category"],
        breadcrumb=record["product_category"],
    )


# ------------------------------------------------------------------------------------------------------------ goals
NO_LIMIT = 1_000_000.0


def draw_limit(price: float, rng: random.Random) -> float:
    """A price limit above the price, in dollars."""
    first = max(1, int(min(price, 990) // 10))
    above = [10.0 * i for i in range(first, min(first + 6, 100)) if 10.0 * i > price][:4]
    return max(rng.sample(above, 2)) if len(above) > 1 else NO_LIMIT


Row = tuple[str, list[str], list[str] | None, int]  # instruction, attributes, options (None: any), number of goals


def synthetic_rows(product: Product, instructions: dict) -> Iterator[Row]:
    """The generated instruction of a product, if it has one: a goal for every choice of options."""
    record = instructions.get(product.asin, {})
    text, attributes = record.get("instruction"), record.get("instruction_attributes")
    if text and attributes:
        yield text, attributes, None, math.prod(map(len, product.options.values()))


def human_rows(product: Product, instructions: dict) -> Iterator[Row]:
    """The instructions that people wrote, a goal each; their options are values without names."""
    for record in instructions.get(product.asin, []):
        attributes = record["instruction_attributes"]
        if attributes:
            yield record["instruction"].strip("."), attributes, list(record["instruction_options"]), 1


def make_goal(
    product: Product, text: str, attributes: list[str], options: list[str] | None, limit: float, number: int
) -> dict:
    """The goal of that number among those of an instruction."""
    wanted: dict | list = options or []
    if options is None:
        names = sorted(product.options)
        choices = itertools.product(*(product.options[name] for name in names))
        wanted = dict(zip(names, next(itertools.islice(choices, number, None)), strict=True))
        if wanted:
            text += " with " + ", and ".join(f"{k}: {v}" for k, v in wanted.items())
    if limit != NO_LIMIT:
        text += f", and price lower than {limit:.2f} dollars"
    return {
        "asin": product.asin,
        "category": product.category,
        "query": product.query,
        "name": product.title,
        "product_category": product.breadcrumb,
        "instruction_text": text,
        "attributes": attributes,
        "price_upper": limit,
        "goal_options": wanted,
    }


PRICE_CLAUSE = re.compile(r",? and price lower than [\d.]+ dollars$")
OPTION_CLAUSE = re.compile(r" with (?:(?! with )[^,:])+: .*$")
OPENING = re.compile(
    r"^(find me|show me|i am looking for|i'm looking for|i would like|i need|i want|looking for)( an?)? ", re.I
)


def without_price(instruction: str) -> str:
    return PRICE_CLAUSE.sub("", instruction.strip())


def described(instruction: str) -> str:
    """The wish alone, without the price and "i need a"."""
    return OPENING.sub("", without_price(instruction))


def price_limit(instruction: str) -> float:
    """The highest price that an instruction allows, in dollars; infinite if it names none."""
    clause = PRICE_CLAUSE.search(instruction.strip())
    return float(clause[0].split()[-2]) if clause else math.inf


def queries(instruction: str) -> list[str]:
    """Searches that the instruction suggests, for candidates of tiny models: all but its price, the best by far, as
    search weighs words by how rare they are; that without "i need a"; and without the options."""
    instruction = re.sub(r"[\[\]\n]", " ", instruction)  # which an action search[...] can't hold
    core = described(instruction)
    suggested = (without_price(instruction), core, OPTION_CLAUSE.sub("", core))
    return list(dict.fromkeys(query for query in suggested if query))


# ----------------------------------------------------------------------------------------------------------- splits
SHARES = {"train": (0, 70), "val": (70, 80), "test": (80, 100)}  # % of the products


def splits(
    owners: np.ndarray,
    shares: np.ndarray,
    published: str | Path | None = None,
    per_product: float = math.inf,
    tuning: int = 0,
) -> dict[str, np.ndarray]:
    """Split name -> indices of goals; "all" is always there.

    owners (goals,): the product of each goal. shares (products,): places in 0 to 99, by a hash of the asin.
    By default train, val and test: 70, 10 and 20 % of the *products*, so that a product stays in its split whatever
    the seed. Published ones: a file, or a folder with NAME_indices*.json (as ETO's); a file is a JSON
    list of goal indices, and one that comes twice counts once.

    per_product: of each product a split keeps so many goals, the first ones. A product has a synthetic goal for each of
    its combinations of options, so that without a limit a few products are most of the tasks.
    tuning: so many of "test", the first in fair order, are a split of their own: choices were made in view of them.
    """
    everything = np.arange(len(owners), dtype=np.int32)
    if published is not None:
        of_files = published_splits(published).items()
        members = {name: goal_indices(file, ids, len(owners)) for name, (file, ids) in of_files}
    else:
        share = shares[owners]
        members = {name: everything[(share >= low) & (share < high)] for name, (low, high) in SHARES.items()}
    if tuning:
        order = fair_order(map(str, members["test"].tolist()), lambda task_id: "")
        used = np.array(order[:tuning], np.int32)
        members |= {"test": np.setdiff1d(members["test"], used), "tuning": np.sort(used)}
    members["all"] = everything
    return {name: first_of_each(indices, owners, per_product) for name, indices in members.items()}


def goal_indices(file: Path, indices: list, goals: int) -> np.ndarray:
    """A published split's goals, each once."""
    if not all(type(i) is int for i in indices):
        raise UserError(f"{file}: a JSON list of integers is expected")
    beyond = [i for i in indices if not 0 <= i < goals]
    if beyond:
        raise UserError(f"{file}: index {beyond[0]}, but there are only {goals} goals; take the catalogue it is for")
    return np.array(list(dict.fromkeys(indices)), np.int32)


def first_of_each(indices: np.ndarray, owners: np.ndarray, most: float) -> np.ndarray:
    """The first goals of each product, at most so many."""
    if not most or most < 1:
        raise UserError("--env-option per_product: a number from 1 is expected")
    if most == math.inf:
        return indices
    order = np.argsort(owners[indices], kind="stable")  # the goals of a product together
    sizes = np.unique(owners[indices], return_counts=True)[1]
    nth = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return indices[np.sort(order[nth < most])]
