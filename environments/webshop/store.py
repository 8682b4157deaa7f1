"""A shop on disk: WebShop's files, cleaned and indexed once, then mapped into memory by every process that opens it.

    store = open_store(folder)  # builds it first if need be: minutes for 1.18 million products
    store.products[7], store.goals["human"].draw(store.draw_prices(rng), rng)[0]

A large shop's store lies beside its files, or in a folder that is named; a small one's is made anew at each start, in a
temporary folder. It belongs to its sources (size, time and a sample of the bytes) and to the code that cleans them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import random
import shutil
import tempfile
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from data.make_webshop import is_made, place
from qlass import UserError

from . import catalogue, search
from .catalogue import Product

SMALL = 1 << 24  # bytes of source files: less is read faster than it is worth to keep
ROWS = {"synthetic": catalogue.synthetic_rows, "human": catalogue.human_rows}
OFF_SCHEMA = (AttributeError, KeyError, TypeError, ValueError)


# ------------------------------------------------------------------------------------------------------------- parts
def mapped(path: str | Path) -> np.ndarray:
    return np.load(path, mmap_mode="r").view(np.ndarray)


class Texts(Sequence[str]):
    """Strings in a mapped file; `ends` (n + 1,) says where each begins and ends."""

    def __init__(self, path: Path) -> None:
        self.bytes, self.ends = np.memmap(path, mode="r").view(np.ndarray), mapped(f"{path}.npy")

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, i: Any) -> Any:
        return self.bytes[self.ends[i] : self.ends[i + 1]].tobytes().decode("utf-8", "surrogatepass")


class TextWriter(contextlib.AbstractContextManager):
    def __init__(self, path: Path) -> None:
        self.path, self.file, self.ends = path, open(path, "wb"), array("q", [1])  # noqa: SIM115
        self.file.write(b"\n")  # an empty file can't be mapped

    def append(self, text: str) -> None:
        self.ends.append(self.ends[-1] + self.file.write(text.encode("utf-8", "surrogatepass")))

    def __exit__(self, *error: Any) -> None:
        self.file.close()
        np.save(f"{self.path}.npy", np.frombuffer(self.ends, np.int64))


class Places(Mapping[str, int]):
    """Where strings stand that are sorted by code point; `places`: what stands for them, if not their rank."""

    def __init__(self, texts: Texts, places: np.ndarray | range) -> None:
        self.texts, self.places, self.find = texts, places, lru_cache(1 << 16)(self._find)

    def _find(self, text: str) -> int | None:
        rank = bisect_left(self.texts, text)
        return int(self.places[rank]) if rank < len(self.texts) and self.texts[rank] == text else None

    def __getitem__(self, text: str) -> int:
        if (place := self.find(text)) is None:
            raise KeyError(text)
        return place

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)

    def __len__(self) -> int:
        return len(self.texts)


class Products(Sequence[Product]):
    """In file order, read when they are asked for."""

    def __init__(self, texts: Texts) -> None:
        self.texts, self.read = texts, lru_cache(1 << 14)(self._read)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, i: Any) -> Product:
        return self.read(i)

    def _read(self, i: int) -> Product:
        asin, title, description, bullets, prices, options, attributes, *rest = json.loads(self.texts[i])
        options = {name: tuple(values) for name, values in options.items()}
        return Product(asin, title, description, tuple(bullets), tuple(prices), options, tuple(attributes), *rest)


class Goals(Sequence[dict]):
    """In the original's order, made when they are asked for. A row holds the goals of one instruction.

    of (rows,): the position of a row's product; ends (rows,): its goals before the shuffle are those up to there;
    order (goals,): the shuffle; limits (rows,): price limits in dollars.
    """

    def __init__(self, path: Path, products: Products) -> None:
        self.rows, self.products, self.limits = Texts(path), products, array("d")
        self.of, self.ends, self.order = (mapped(f"{path}.{name}.npy") for name in GOAL_ARRAYS)
        error = Path(f"{path}.error")
        self.error = error.read_text(encoding="utf-8") if error.exists() else None
        self.read = lru_cache(1 << 14)(self._read)

    def draw(self, prices: Sequence[float], rng: random.Random) -> Goals:
        """Draw the price limits, in catalogue order; UserError if the file of the instructions is off the schema."""
        if self.error:
            raise UserError(self.error)
        self.limits = array("d", (catalogue.draw_limit(prices[i], rng) for i in self.of.tolist()))
        return self

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: Any) -> dict:
        return self.read(i)

    def _read(self, i: int) -> dict:
        goal = int(self.order[i])
        row = int(np.searchsorted(self.ends, goal, "right"))
        before = int(self.ends[row - 1]) if row else 0
        text, attributes, options = json.loads(self.rows[row])
        product = self.products[int(self.of[row])]
        return catalogue.make_goal(product, text, attributes, options, self.limits[row], goal - before)

    def owners(self) -> np.ndarray:
        """(goals,): the position of each goal's product."""
        return np.repeat(self.of, np.diff(self.ends, prepend=0))[self.order]


GOAL_ARRAYS = ("of", "ends", "order")


class Store:
    """by_asin (n,): positions in the order of asins; shares (n,): places in 0 to 99, by a hash of the asin;
    prices (n, 2): in dollars, the second NaN where there is no range."""

    def __init__(self, folder: Path) -> None:
        self.products = Products(Texts(folder / "products"))
        self.goals = {kind: Goals(folder / kind, self.products) for kind in ROWS}
        arrays = {name: mapped(folder / f"{name}.npy") for name in ("by_asin", "shares", "prices", *search.ARRAYS)}
        self.by_asin, self.shares, self.prices = (arrays.pop(name) for name in ("by_asin", "shares", "prices"))
        self.position = Places(Texts(folder / "asins"), self.by_asin)
        words = Texts(folder / "words")
        self.index = search.SearchIndex(len(self.products), Places(words, range(len(words))), **arrays)

    def draw_prices(self, rng: random.Random) -> array:
        """One price per product, in catalogue order; it decides `r_price` and is never shown."""
        prices = array("d", self.prices[:, 0].tobytes())
        for i in np.flatnonzero(~np.isnan(self.prices[:, 1])).tolist():
            prices[i] = rng.uniform(*self.prices[i].tolist())
        return prices


# ---------------------------------------------------------------------------------------------------------- building
def open_store(folder: Path, cache: Path | None = None) -> Store:
    """The shop of a folder. cache: where its store is kept; None: beside the files, if they are large."""
    sources = catalogue.sources(folder)
    if cache is None and sum(path.stat().st_size for path in sources) < SMALL:
        with tempfile.TemporaryDirectory(prefix="webshop-") as draft:
            build(sources, Path(draft), quiet=True)
            return Store(Path(draft))  # what is mapped stays when its name is gone
    name, note = f"webshop-{zlib.crc32(bytes(folder.resolve())):08x}", fingerprint(sources)
    parent = folder if cache is None else cache
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with wait_for(FileLock(parent / f".{name}.lock"), f"{parent / name}"):
            if not is_made(parent / name, note):
                for draft in parent.glob(f".{name}-*"):  # of a process that was killed
                    shutil.rmtree(draft)
                place(parent / name, note, lambda draft: build(sources, draft))
    except OSError as error:  # not allowed, or no space
        raise UserError(f"{error}: name a folder for the shop's index with --env-option cache=DIR") from None
    return Store(parent / name)


@contextlib.contextmanager
def wait_for(lock: FileLock, what: str) -> Iterator[None]:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"{what}: waiting for another process that makes it", flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def fingerprint(sources: Sequence[Path]) -> str:
    """Of the sources size, time and 64 blocks of bytes; and the code, since a store is no better than its cleaning."""
    lines = [hashlib.blake2b(b"".join(Path(m.__file__).read_bytes() for m in (catalogue, search))).hexdigest()]
    lines.append(hashlib.blake2b(Path(__file__).read_bytes()).hexdigest())
    for path in sources:
        size, block, sample = path.stat().st_size, 1 << 16, hashlib.blake2b()
        with open(path, "rb") as file:
            for number in range(64):
                file.seek(max(0, size - block) * number // 63)
                sample.update(file.read(block))
        lines.append(f"{path.name} {size} {path.stat().st_mtime_ns} {sample.hexdigest()}")
    return "\n".join(lines)


def build(sources: tuple[Path, Path, Path], draft: Path, quiet: bool = False) -> None:
    instructions = dict(zip(ROWS, map(catalogue.read_object, sources[1:]), strict=True))
    position: dict[str, int] = {}
    indexer, prices = search.Indexer(), array("d")
    with contextlib.ExitStack() as files:
        texts = files.enter_context(TextWriter(draft / "products"))
        goals = {kind: files.enter_context(GoalWriter(draft / kind, kind, sources[0].parent)) for kind in ROWS}
        for number, record in enumerate(catalogue.stream(sources[0], quiet)):
            try:
                asin = record["asin"]
                if asin == "nan" or len(asin) > 10 or asin in position:
                    continue
                known = instructions["synthetic"].get(asin, {})
                product = catalogue.clean(record, known.get("attributes", ["DUMMY_ATTR"]))
            except OFF_SCHEMA as error:
                message = f"{sources[0]}: product number {number} is not in WebShop's schema ({error!r})"
                raise UserError(message) from None
            position[asin] = len(position)
            texts.append(json.dumps([getattr(product, name) for name in Product.__slots__]))
            prices.extend([*product.prices, math.nan][:2])
            indexer.add(product.document)
            for kind in ROWS:
                goals[kind].add(position[asin], product, instructions[kind])
    instructions.clear()
    asins = sorted(position)
    by_asin = np.array([position[asin] for asin in asins], np.int32)  # equal scores: by asin
    rank = np.empty_like(by_asin)
    rank[by_asin] = np.arange(len(asins), dtype=np.int32)
    shares = np.array([zlib.crc32(asin.encode()) % 100 for asin in position], np.uint8)
    words, arrays = indexer.finish(rank)
    arrays |= {"by_asin": by_asin, "shares": shares, "prices": np.array(prices).reshape(-1, 2)}
    for name, content in arrays.items():
        np.save(draft / f"{name}.npy", content)
    for name, strings in {"asins": asins, "words": words}.items():
        with TextWriter(draft / name) as texts:
            for text in strings:
                texts.append(text)


class GoalWriter(TextWriter):
    """The rows of one kind of goal. A record that is off the schema harms those alone who ask for this kind."""

    def __init__(self, path: Path, kind: str, folder: Path) -> None:
        super().__init__(path)
        self.make, self.folder, self.of, self.counts, self.error = ROWS[kind], folder, array("i"), array("q"), ""

    def add(self, position: int, product: Product, instructions: dict) -> None:
        try:
            for text, attributes, options, count in self.make(product, instructions):
                self.append(json.dumps([text, attributes, options]))
                self.of.append(position)
                self.counts.append(count)
        except OFF_SCHEMA as error:
            self.error = self.error or f"{self.folder}: an instruction is not in WebShop's schema ({error!r})"

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        order = list(range(sum(self.counts)))
        random.Random(233).shuffle(order)  # the original's order: fixed whatever the prices
        arrays = np.array(self.of, np.int32), np.cumsum(self.counts, dtype=np.int64), np.array(order, np.int32)
        for name, content in zip(GOAL_ARRAYS, arrays, strict=True):
            np.save(f"{self.path}.{name}.npy", content)
        if self.error:
            Path(f"{self.path}.error").write_text(self.error, encoding="utf-8")
