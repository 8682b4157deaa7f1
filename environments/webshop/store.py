"""A shop on disk: WebShop's files, cleaned and indexed once, then mapped into memory by every process that opens it.

A large shop's store lies beside its files, or in a folder that is named; a small one's is made anew at each start, in a
temporary folder. It belongs to its sources (size, time and a sample of the bytes) and to the code that cleans them.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
import tempfile
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from data.make_webshop import is_made, place
from qlass import UserError

from . import catalogue, search
from .catalogue import Product

SMALL = 1 << 24  # bytes of source files: less is read faster than it is worth to keep
ROWS = {"synthetic": catalogue.synthetic_rows, "human": catalogue.human_rows}
OFF_SCHEMA = (AttributeError, KeyError, TypeError, ValueError)


def mapped(path: str | Path) -> np.ndarray:
    return np.load(path, mmap_mode="r").view(np.ndarray)


class Texts(Sequence[str]):
    """Strings in a mapped file; `ends` (n + 1,) says where each begins and ends."""

    def __init__(self, path: Path) -> None:
        self.bytes = np.memmap(path, mode="r").view(np.ndarray)
        self.ends = mapped(f"{path}.npy")
        self.find = lru_cache(1 << 16)(self._find)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, i: Any) -> Any:
        return self.bytes[self.ends[i] : self.ends[i + 1]].tobytes().decode("utf-8", "surrogatepass")

    def _find(self, text: str) -> int | None:
        """The place of a string in a sorted list."""
        rank = bisect_left(self, text)
        return rank if rank < len(self) and self[rank] == text else None


def write(path: Path, texts: Iterable[str]) -> None:
    with open(path, "wb") as file:
        ends = array("q", [file.write(b"\n")])  # an empty file can't be mapped
        for text in texts:
            ends.append(ends[-1] + file.write(text.encode("utf-8", "surrogatepass")))
    np.save(f"{path}.npy", np.frombuffer(ends, np.int64))


class Lazy(Sequence[Any]):
    """n things, each made when it is asked for; the last ones are kept."""

    def __init__(self, n: int, make: Callable[[int], Any]) -> None:
        self.n, self.make = n, lru_cache(1 << 14)(make)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: Any) -> Any:
        return self.make(i)


class Store:
    """products, in file order; goals of "synthetic" or "human" instructions, in the original's order.

    prices (n,): drawn from a seed, one per product in catalogue order, and then the goals' price limits. by_asin (n,):
    positions in the order of asins. shares (n,): places in 0 to 99, by a hash of the asin. owners (goals,): positions
    of the goals' products. A row holds the goals of one instruction; of (rows,): its product; ends (rows,): its goals,
    before the shuffle `order`, are those up to there.
    """

    def __init__(self, folder: Path, kind: str, seed: int) -> None:
        self.texts = Texts(folder / "products")
        self.asins = Texts(folder / "asins")
        self.rows = Texts(folder / kind)
        arrays = {path.stem: mapped(path) for path in folder.glob("*.npy")}
        self.by_asin = arrays["by_asin"]
        self.shares = arrays["shares"]
        self.of = arrays[f"{kind}.of"]
        self.ends = arrays[f"{kind}.ends"]
        self.order = arrays[f"{kind}.order"]
        index = {name: arrays[name] for name in search.ARRAYS}
        self.index = search.SearchIndex(len(self.texts), Texts(folder / "words").find, **index)
        self.error = json.loads((folder / "errors.json").read_bytes()).get(kind)
        rng = random.Random(seed)
        self.prices = draw_prices(arrays["prices"], rng)
        self.limits = array("d", (catalogue.draw_limit(self.prices[i], rng) for i in self.of.tolist()))
        self.owners = np.repeat(self.of, np.diff(self.ends, prepend=0))[self.order]
        self.products = Lazy(len(self.texts), self.product)
        self.goals = Lazy(len(self.order), self.goal)

    def product(self, i: int) -> Product:
        return Product(*json.loads(self.texts[i]))

    def goal(self, i: int) -> dict:
        place = self.order[i]
        row = int(np.searchsorted(self.ends, place, "right"))
        number = int(place - (self.ends[row - 1] if row else 0))
        text, attributes, options = json.loads(self.rows[row])
        product = self.products[int(self.of[row])]
        return catalogue.make_goal(product, text, attributes, options, self.limits[row], number)

    def position(self, asin: str) -> int | None:
        rank = self.asins.find(asin)
        return None if rank is None else int(self.by_asin[rank])


def draw_prices(ranges: np.ndarray, rng: random.Random) -> array:
    """ranges (n, 2): a price and nan, or both ends of a range, from which one is drawn."""
    prices = array("d", ranges[:, 0].tobytes())
    for i in np.flatnonzero(~np.isnan(ranges[:, 1])).tolist():
        low, high = ranges[i].tolist()
        prices[i] = rng.uniform(low, high)
    return prices


def open_store(folder: Path, kind: str = "synthetic", seed: int = 0, cache: Path | None = None) -> Store:
    """The shop of a folder, made if need be. cache: where it is kept; None: beside its files, if they are large."""
    sources = catalogue.sources(folder)
    if cache is None and sum(path.stat().st_size for path in sources) < SMALL:
        with tempfile.TemporaryDirectory(prefix="webshop-") as draft:
            build(sources, Path(draft), quiet=True)
            return Store(Path(draft), kind, seed)  # what is mapped stays when its name is gone
    parent = sources[0].parent if cache is None else cache
    name = f"{zlib.crc32(bytes(folder.resolve())):08x}"
    kept = parent / f".webshop-{name}"  # hidden: it is no part of the data
    note = fingerprint(sources)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if not is_made(kept, note):
            print(f"{folder}: {kept} is made once, for this process and others; they wait for it", flush=True)
            with FileLock(parent / f".{kept.name}.lock"):
                if not is_made(kept, note):
                    for draft in parent.glob(f".{kept.name}-*"):  # of a process that was killed
                        shutil.rmtree(draft)
                    place(kept, note, lambda draft: build(sources, draft))
                    search.term.cache_clear()  # queries have few words, catalogues a million
    except OSError as error:  # not allowed, or no space
        raise UserError(f"{error}: name a folder for the shop's index with --env-option cache=DIR") from None
    return Store(kept, kind, seed)


def fingerprint(sources: Sequence[Path]) -> str:
    """Size, time and 64 blocks of bytes of the sources; and the code, since a store is no better than its cleaning."""
    code = (Path(__file__), Path(catalogue.__file__), Path(search.__file__))
    lines = [hashlib.blake2b(b"".join(path.read_bytes() for path in code)).hexdigest()]
    block = 1 << 16
    for path in sources:
        size, sample = path.stat().st_size, hashlib.blake2b()
        with open(path, "rb") as file:
            for number in range(64):
                file.seek(max(0, size - block) * number // 63)
                sample.update(file.read(block))
        lines.append(f"{path.name} {size} {path.stat().st_mtime_ns} {sample.hexdigest()}")
    return "\n".join(lines)


class Rows:
    """The rows of goals of one kind of instruction in the making, as of Store."""

    def __init__(self, kind: str, instructions: dict) -> None:
        self.make, self.instructions = ROWS[kind], instructions
        self.texts: list[str] = []
        self.of, self.counts = array("i"), array("q")
        self.error: str | None = None  # it harms those alone who ask for this kind

    def add(self, product: Product, position: int) -> None:
        try:
            for *row, count in self.make(product, self.instructions):
                self.texts.append(json.dumps(row))
                self.of.append(position)
                self.counts.append(count)
        except OFF_SCHEMA as error:
            self.error = self.error or f"an instruction is not in WebShop's schema ({error!r})"

    def arrays(self) -> dict[str, np.ndarray]:
        order = list(range(sum(self.counts)))
        random.Random(233).shuffle(order)  # the original's order: fixed whatever the prices
        return {
            "of": np.array(self.of, np.int32),
            "order": np.array(order, np.int32),
            "ends": np.cumsum(self.counts, dtype=np.int64),
        }


def products_of(source: Path, synthetic: dict, quiet: bool) -> Iterator[tuple[Product, str]]:
    """The products of a file, each asin once, and their documents. synthetic: the records of generated instructions,
    with attributes."""
    seen = set()
    for number, record in enumerate(catalogue.stream(source, quiet)):
        try:
            asin = record["asin"]
            if asin != "nan" and len(asin) <= 10 and asin not in seen:
                attributes = synthetic.get(asin, {}).get("attributes", ["DUMMY_ATTR"])
                product = catalogue.clean(record, attributes)
                seen.add(asin)
                yield product, product.document
        except OFF_SCHEMA as error:
            message = f"{source}: product number {number} is not in WebShop's schema ({error!r})"
            raise UserError(message) from None


def build(sources: tuple[Path, Path, Path], draft: Path, quiet: bool = False) -> None:
    """Write a store: products and rows of goals as texts, the rest as arrays."""
    source, *instructions = sources
    rows = {kind: Rows(kind, catalogue.read_json(path)) for kind, path in zip(ROWS, instructions, strict=True)}
    position: dict[str, int] = {}
    prices = array("d")
    indexer = search.Indexer()

    def texts() -> Iterator[str]:
        for product, document in products_of(source, rows["synthetic"].instructions, quiet):
            number = position[product.asin] = len(position)
            prices.extend([*product.prices, math.nan][:2])
            indexer.add(document)
            for one in rows.values():
                one.add(product, number)
            yield json.dumps([getattr(product, name) for name in Product.__slots__])

    write(draft / "products", texts())
    for table in rows.values():
        table.instructions.clear()  # a large catalogue's are as large as all that follows
    asins = sorted(position)
    by_asin = np.array([position[asin] for asin in asins], np.int32)  # equal scores: by asin
    words, arrays = indexer.finish(np.argsort(by_asin).astype(np.int32))
    arrays["by_asin"] = by_asin
    arrays["shares"] = np.array([zlib.crc32(asin.encode()) % 100 for asin in position], np.uint8)
    arrays["prices"] = np.array(prices).reshape(-1, 2)
    for kind, table in rows.items():
        write(draft / kind, table.texts)
        arrays |= {f"{kind}.{name}": content for name, content in table.arrays().items()}
    for name, content in arrays.items():
        np.save(draft / f"{name}.npy", content)
    write(draft / "asins", asins)
    write(draft / "words", words)
    errors = {kind: table.error for kind, table in rows.items()}
    (draft / "errors.json").write_text(json.dumps(errors))
