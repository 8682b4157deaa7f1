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
from itertools import islice
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
        self.bytes, self.ends = np.memmap(path, mode="r").view(np.ndarray), mapped(f"{path}.npy")
        self.find = lru_cache(1 << 16)(self._find)

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, i: Any) -> Any:
        return self.bytes[self.ends[i] : self.ends[i + 1]].tobytes().decode("utf-8", "surrogatepass")

    def _find(self, text: str) -> int | None:
        """Where a string stands, if they are sorted."""
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

    def __reduce__(self) -> tuple:
        return Lazy, (self.n, self.make.__wrapped__)


class Store:
    """products, in file order; goals of "synthetic" or "human" instructions, in the original's order.

    prices (n,): drawn from a seed, one per product in catalogue order, and then the goals' price limits. by_asin (n,):
    positions in the order of asins. shares (n,): places in 0 to 99, by a hash of the asin. owners (goals,): positions
    of the goals' products. A row holds the goals of one instruction; of (rows,): its product; ends (rows,): its goals,
    before the shuffle `order`, are those up to there.
    """

    def __init__(self, folder: Path, kind: str, seed: int) -> None:
        texts = (Texts(folder / name) for name in ("products", "asins", "words", kind))
        self.texts, self.asins, words, self.rows = texts
        arrays = {path.stem: mapped(path) for path in folder.glob("*.npy")}
        self.by_asin, self.shares, ranges = arrays["by_asin"], arrays["shares"], arrays["prices"]
        self.of, self.ends, self.order = (arrays[f"{kind}.{name}"] for name in ("of", "ends", "order"))
        self.index = search.SearchIndex(len(self.texts), words.find, **{name: arrays[name] for name in search.ARRAYS})
        self.error = json.loads((folder / "errors.json").read_bytes()).get(kind)
        rng, self.prices = random.Random(seed), array("d", ranges[:, 0].tobytes())
        for i in np.flatnonzero(~np.isnan(ranges[:, 1])).tolist():
            self.prices[i] = rng.uniform(*ranges[i].tolist())
        self.limits = array("d", (catalogue.draw_limit(self.prices[i], rng) for i in self.of.tolist()))
        self.owners = np.repeat(self.of, np.diff(self.ends, prepend=0))[self.order]
        self.products, self.goals = Lazy(len(self.texts), self.product), Lazy(len(self.order), self.goal)

    def product(self, i: int) -> Product:
        return Product(*json.loads(self.texts[i]))

    def goal(self, i: int) -> dict:
        row = int(np.searchsorted(self.ends, self.order[i], "right"))
        number = int(self.order[i] - (self.ends[row - 1] if row else 0))
        product = self.products[int(self.of[row])]
        return catalogue.make_goal(product, *json.loads(self.rows[row]), self.limits[row], number)

    def position(self, asin: str) -> int | None:
        rank = self.asins.find(asin)
        return None if rank is None else int(self.by_asin[rank])


def open_store(
    folder: Path, kind: str = "synthetic", seed: int = 0, cache: Path | None = None, first: int | None = None
) -> Store:
    """The shop of a folder, made if need be. cache: where it is kept; None: beside its files, if they are large. first:
    so many products of the file, else all."""
    sources = catalogue.sources(folder)
    if cache is None and sum(path.stat().st_size for path in sources) < SMALL:
        with tempfile.TemporaryDirectory(prefix="webshop-") as draft:
            build(sources, Path(draft), first, quiet=True)
            return Store(Path(draft), kind, seed)  # what is mapped stays when its name is gone
    parent = sources[0].parent if cache is None else cache
    name = f"{zlib.crc32(bytes(folder.resolve())):08x}-{'all' if first is None else first}"
    kept, note = parent / f".webshop-{name}", fingerprint(sources)  # hidden: it is no part of the data
    try:
        parent.mkdir(parents=True, exist_ok=True)
        if not is_made(kept, note):
            print(f"{folder}: {kept} is made once, for this process and others; they wait for it", flush=True)
            with FileLock(parent / f".{kept.name}.lock"):
                if not is_made(kept, note):
                    for draft in parent.glob(f".{kept.name}-*"):  # of a process that was killed
                        shutil.rmtree(draft)
                    place(kept, note, lambda draft: build(sources, draft, first))
                    search.term.cache_clear()  # queries have few words, catalogues a million
    except OSError as error:  # not allowed, or no space
        raise UserError(f"{error}: name a folder for the shop's index with --env-option cache=DIR") from None
    return Store(kept, kind, seed)


def fingerprint(sources: Sequence[Path]) -> str:
    """Of the sources size, time and 64 blocks of bytes; and the code, since a store is no better than its cleaning."""
    code = (Path(__file__), Path(catalogue.__file__), Path(search.__file__))
    lines = [hashlib.blake2b(b"".join(path.read_bytes() for path in code)).hexdigest()]
    for path in sources:
        size, block, sample = path.stat().st_size, 1 << 16, hashlib.blake2b()
        with open(path, "rb") as file:
            for number in range(64):
                file.seek(max(0, size - block) * number // 63)
                sample.update(file.read(block))
        lines.append(f"{path.name} {size} {path.stat().st_mtime_ns} {sample.hexdigest()}")
    return "\n".join(lines)


def build(sources: tuple[Path, Path, Path], draft: Path, first: int | None = None, quiet: bool = False) -> None:
    """Write a store: products and rows of goals as texts, the rest as arrays."""
    instructions = dict(zip(ROWS, map(catalogue.read_object, sources[1:]), strict=True))
    position: dict[str, int] = {}
    indexer, prices, errors = search.Indexer(), array("d"), {}
    rows: dict[str, tuple[list[str], array, array]] = {kind: ([], array("i"), array("q")) for kind in ROWS}

    def add(product: Product) -> str:
        prices.extend([*product.prices, math.nan][:2])
        indexer.add(product.document)
        for kind, make in ROWS.items():
            try:
                for *row, count in make(product, instructions[kind]):
                    for part, value in zip(rows[kind], (json.dumps(row), position[product.asin], count), strict=True):
                        part.append(value)
            except OFF_SCHEMA as error:  # it harms those alone who ask for this kind
                errors.setdefault(kind, f"an instruction is not in WebShop's schema ({error!r})")
        return json.dumps([getattr(product, name) for name in Product.__slots__])

    def products() -> Iterator[str]:
        for number, record in enumerate(islice(catalogue.stream(sources[0], quiet), first)):
            try:
                asin = record["asin"]
                if asin == "nan" or len(asin) > 10 or asin in position:
                    continue
                instruction = instructions["synthetic"].get(asin, {})
                product = catalogue.clean(record, instruction.get("attributes", ["DUMMY_ATTR"]))
            except OFF_SCHEMA as error:
                message = f"{sources[0]}: product number {number} is not in WebShop's schema ({error!r})"
                raise UserError(message) from None
            position[asin] = len(position)
            yield add(product)

    write(draft / "products", products())
    instructions.clear()
    asins = sorted(position)
    by_asin = np.array([position[asin] for asin in asins], np.int32)  # equal scores: by asin
    words, arrays = indexer.finish(np.argsort(by_asin).astype(np.int32))
    shares = np.array([zlib.crc32(asin.encode()) % 100 for asin in position], np.uint8)
    arrays |= {"by_asin": by_asin, "shares": shares, "prices": np.array(prices).reshape(-1, 2)}
    for kind, (texts, of, counts) in rows.items():
        write(draft / kind, texts)
        order = list(range(sum(counts)))
        random.Random(233).shuffle(order)  # the original's order: fixed whatever the prices
        arrays |= {f"{kind}.of": np.array(of, np.int32), f"{kind}.order": np.array(order, np.int32)}
        arrays[f"{kind}.ends"] = np.cumsum(counts, dtype=np.int64)
    for name, content in arrays.items():
        np.save(draft / f"{name}.npy", content)
    write(draft / "asins", asins)
    write(draft / "words", words)
    (draft / "errors.json").write_text(json.dumps(errors))
