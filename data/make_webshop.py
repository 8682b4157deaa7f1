"""The bundled WebShop catalogue: made-up products in WebShop's own files, so that a fresh clone has a shop to run.

    python data/make_webshop.py [--seed 0] [--products 1500] [--out data/generated/webshop-0]

Writes `items_shuffle.json`, `items_ins_v2.json`, `items_human_ins.json` (WebShop's schema, docs/files.md) and
`title_nouns.json` (asin -> what the title names, for the type part of the reward). The same seed gives the same bytes.
Above 2,000 products (WebShop has 1,180,000) it writes a crowd of made-up words, to measure and not to learn.

Here reading pays. Products come in families of four of one kind ("jacket") that share an attribute ("padded") and their
options. What else a product has is on its features page alone, which no search reads. Tasks ask for two members; the
third costs too much; the fourth is no jacket, though its text names one so often that search puts it first. Asked
for "a hooded padded lined jacket with color: red, and size: large, and price lower than 60.00 dollars":

    Velmo padded jacket cover    $34.0     pays nothing: another kind of thing
    Norda padded jacket          $37.0     padded, belted, ...
    Kesta padded jacket          $73.0     too dear
    Tarvo padded jacket          $31.0     padded, hooded, lined: this one

An instruction names three attributes and never the brand; no other has this kind with these three, so splits by product
share no instruction. The vocabulary is closed and small (about 200 words), attributes and values are single words: a
model of a million parameters, trained from scratch, can read it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

GENERATED = Path(__file__).parent / "generated"

COLORS = "red blue green black white yellow pink brown"
SIZES = "small medium large huge"

# category: (kinds, attributes that titles show, attributes that only the features page shows, {option: values})
SHELVES: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "fashion": (
        "jacket shirt sweater dress skirt coat scarf hat belt vest",
        "padded quilted pleated fringed beaded ruffled knitted woven printed cropped",
        "lined hooded washable reversible stretchy breathable waterproof windproof",
        {"color": COLORS, "size": SIZES},
    ),
    "beauty": (
        "shampoo lotion balm soap serum lipstick perfume mask toner conditioner",
        "foaming tinted shimmering oiled powdered whipped creamy glossy sheer cooling",
        "vegan unscented hypoallergenic organic nourishing soothing gentle firming",
        {"scent": "jasmine vanilla citrus cedar musk apple", "size": SIZES},
    ),
    "grocery": (
        "cookie cracker muffin pretzel bagel cake pie soup sauce salad",
        "salted smoked sweetened frosted glazed filled spiced buttered toasted crunchy",
        "kosher organic vegan handmade seasonal imported wholesome fortified",
        {"flavor": "honey ginger almond maple garlic pepper", "pack": "single double triple"},
    ),
    "electronics": (
        "speaker headset charger keyboard camera monitor radio router printer projector",
        "slim lighted folding cushioned mounted compact rugged curved portable retro",
        "rechargeable wireless shielded waterproof programmable silent encrypted dimmable",
        {"color": COLORS, "plug": "american british european"},
    ),
    "garden": (
        "chair table lamp rug shelf mirror pillow curtain vase basket",
        "carved framed weighted gilded lacquered folding tiled painted rustic tufted",
        "rustproof washable handmade stackable fireproof recycled adjustable waterproof",
        {"color": COLORS, "shape": "round square oval"},
    ),
}
BRANDS = "Norda Velmo Tarvo Kesta Brivo Zelka Ombri Junta Pelix Sarto Wexla Dovik Fenlo Galtu Hirma Mirto Rovka"
USES = "home work travel"
OPENINGS = ("find me", "i need", "i want", "i am looking for")
EXTRAS = ("box", "bag", "cover", "stand")  # what is for a product of the kind, and none itself
FAMILY = 4
CODES = 26_000  # A000 to Z999
PRODUCTS = 1500
LARGEST = FAMILY * sum(len(kinds.split()) * len(shown.split()) for kinds, shown, _, _ in SHELVES.values())


def instruct(rng: random.Random, words: list[str]) -> str:
    """'i need a cotton waterproof jacket'; the shop adds the options and the price limit."""
    article = "an" if words[0][0] in "aeiou" else "a"
    return f"{rng.choice(OPENINGS)} {article} {' '.join(words)}"


def family(rng: random.Random, category: str, kind: str, shown: str) -> list[dict]:
    """Four products as records with the keys of WebShop's files (and `wishes`: what an instruction names of it).

    `shown`: the attribute in all their titles.
    """
    hidden, groups = SHELVES[category][2].split(), SHELVES[category][3]
    names = sorted(groups) if rng.random() < 0.5 else rng.sample(sorted(groups), 1)
    values = {name: rng.sample(groups[name].split(), 3) for name in names}
    options = {name: [{"value": value, "image": None} for value in values[name]] for name in names}
    brands, tens = rng.sample(BRANDS.split(), FAMILY), 10 * rng.randint(1, 5)
    a, b, c, d, e, f = rng.sample(hidden, 6)
    own = {"wanted": (a, b), "wanted too": (c, d), "too dear": (b, e), "extra": (c, f)}
    members = []
    for role, brand in zip(own, brands, strict=True):
        extra = [rng.choice(EXTRAS)] if role == "extra" else []
        praise = rng.randint(1, 3) if extra else rng.randint(0, 2)
        text = [f"A {' '.join([shown, kind, *extra])} for {use}." for use in rng.sample(USES.split(), praise)]
        attributes = [*([] if extra else [shown]), *own[role]]
        # The limit of a goal is at most the fourth multiple of ten above the price, so four tens more is too dear.
        price = tens + rng.randint(1, 9) + (40 if role == "too dear" else 0)
        members.append(
            {
                "name": " ".join([brand, shown, kind, *extra]),
                "full_description": " ".join([f"Made by {brand}.", *text]),
                "small_description": [shown, *rng.sample(own[role], 2)],  # search reads the first alone
                "pricing": f"${price}.00",
                "customization_options": options,
                "category": category,
                "query": " ".join([kind, *extra]),
                "product_category": f"{category} › {' '.join([kind, *extra])}",
                "images": [""],
                "attributes": attributes,
                "noun": (extra or [kind])[0],
                "wishes": rng.sample(attributes, 3) if role.startswith("wanted") else None,
            }
        )
    return members


def catalogue(seed: int = 0, products: int = PRODUCTS) -> dict[str, object]:
    """File name -> content. `products` is rounded up to whole families."""
    rng = random.Random(f"webshop {seed}")
    shelves = [
        (category, kind, shown)
        for category, (kinds, attributes, _, _) in SHELVES.items()
        for kind in kinds.split()
        for shown in attributes.split()
    ]
    members = []
    for shelf in rng.sample(shelves, -(-products // FAMILY)):
        members += family(rng, *shelf)
    rng.shuffle(members)
    codes = rng.sample(range(CODES), len(members))
    items, attributes, human, nouns = [], {}, {}, {}
    for code, product in zip(codes, members, strict=True):
        asin = f"{chr(ord('A') + code // 1000)}{code % 1000:03d}"
        wishes, kind = product.pop("wishes"), product["query"]
        attributes[asin] = {"attributes": product.pop("attributes")}
        nouns[asin] = [product.pop("noun")]
        items.append({"asin": asin, **product})
        if wishes:
            attributes[asin] |= {"instruction": instruct(rng, [*wishes, kind]), "instruction_attributes": wishes}
            wanted = [rng.choice(values)["value"] for values in product["customization_options"].values()]
            text = f"{instruct(rng, [*wishes, kind])} that is {' and '.join(wanted)}"
            human[asin] = [
                {"asin": asin, "instruction": text, "instruction_attributes": wishes, "instruction_options": wanted}
            ]
    return {
        "items_shuffle.json": items,
        "items_ins_v2.json": attributes,
        "items_human_ins.json": human,
        "title_nouns.json": nouns,
    }


# A crowd: as many products as the full catalogue has, to measure size and speed. Their texts are of made-up words, as
# frequent as those of WebShop's 1,000 products (the r-th: 1 / (r + 40)), and as long.
CROWD = 1_180_000
WORDS, FLATTER = 1_000_000, 40
SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxz" for vowel in "aeiou"]


def crowd(seed: int, products: int) -> Iterator[tuple[dict, dict, list[dict]]]:
    """Yield product after product: its record in items_shuffle, in items_ins_v2, and its human instructions."""
    rng = random.Random(f"webshop crowd {seed}")
    uniform, ratio = rng.random, (WORDS + FLATTER) / FLATTER
    vocabulary = ["".join(pair) for pair in itertools.product(SYLLABLES, repeat=2)]
    vocabulary += ["".join(triple) for triple in itertools.product(SYLLABLES, repeat=3)][: WORDS - len(vocabulary)]

    def words(n: int) -> str:
        return " ".join([vocabulary[int(FLATTER * ratio ** uniform()) - FLATTER] for _ in range(n)])

    for number in range(products):
        code, asin = number * 1_000_003 % 36**6, ""
        while len(asin) < 6:
            code, digit = divmod(code, 36)
            asin = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"[digit] + asin
        asin, category, kind = f"B0QL{asin}", rng.choice([*SHELVES]), words(2)
        attributes, options = [words(2) for _ in range(5)], {}
        for name, values in (("color", COLORS.split()), ("size", SIZES.split())):
            if uniform() < 0.4:
                options[name] = [f"{rng.choice(values)} {words(1)}" for _ in range(rng.randint(2, 9))]
        low = rng.randint(500, 20_000) / 100
        bullets = [f"{attribute} {words(rng.randint(5, 25))}" for attribute in attributes]
        item = {
            "asin": asin,
            "name": f"{words(1)} {' '.join(attributes[:2])} {kind} {words(rng.randint(2, 12))}",
            "full_description": f"{' '.join(attributes)} {kind} {words(rng.randint(0, 110))}",
            "small_description": bullets,
            "pricing": f"${low:.2f}" if uniform() < 0.9 else f"${low:.2f} - ${low * 2:.2f}",
            "customization_options": {
                name: [{"value": value, "image": None} for value in values] for name, values in options.items()
            },
            "category": category,
            "query": kind,
            "product_category": f"{category} › {kind.split()[0]} › {kind}",
            "images": [f"https://example.com/{asin}.jpg"],
        }
        wishes, human = rng.sample(attributes, 3), []
        record: dict = {"attributes": attributes}
        if uniform() < 0.4:
            record |= {"instruction": f"Find me {', '.join(wishes)} {kind}", "instruction_attributes": wishes}
        if uniform() < 0.01:
            wanted = [rng.choice(values) for values in options.values()]
            text = " ".join(["i am looking for", *wishes, kind, *wanted])
            human = [{"asin": asin, "instruction": f"{text}.", "instruction_attributes": wishes}]
            human[0]["instruction_options"] = wanted
        yield item, record, human


def write_crowd(folder: Path, seed: int, products: int) -> None:
    from tqdm import tqdm

    names, every = ("shuffle", "ins_v2", "human_ins"), 0.1 if sys.stderr.isatty() else 30
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(folder / f"items_{name}.json", "w", encoding="utf-8")) for name in names]
        begin = ["[", "{", "{"]
        for item, record, human in tqdm(crowd(seed, products), "products", products, mininterval=every):
            key = json.dumps(item["asin"])
            texts = [json.dumps(item, ensure_ascii=False), f"{key}: {json.dumps(record)}"]
            for number, text in enumerate([*texts, f"{key}: {json.dumps(human)}"] if human else texts):
                files[number].write(f"{begin[number]}\n{text}")
                begin[number] = ","
        for file, mark, ends in zip(files, begin, ("[]", "{}", "{}"), strict=True):
            file.write(f"{ends}\n" if mark in ends else f"\n{ends[1]}\n")


def write(folder: Path, seed: int, products: int) -> Path:
    def fill(fresh: Path) -> None:
        if products > LARGEST:
            return write_crowd(fresh, seed, products)
        for name, content in catalogue(seed, products).items():
            (fresh / name).write_text(json.dumps(content, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")

    return place(folder, made_by(seed, products), fill)


def place(folder: Path, note: str, fill: Callable[[Path], None]) -> Path:
    """Put what `fill` writes at `folder`, all or nothing: a reader never sees half of it, and writers may race.

    note: what it is made by and how, the file `made_by`; a folder with the same note is there already.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fill(fresh)
        (fresh / "made_by").write_text(note)
        fresh.chmod(0o755)
        while not is_made(folder, note):
            try:
                os.rename(fresh, folder)  # works if there is none, or an empty one
            except OSError:
                if not is_made(folder, note):  # else another writer was faster
                    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
                    with contextlib.suppress(FileNotFoundError):  # another writer has moved it away
                        os.rename(folder, old)
                    shutil.rmtree(old)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def is_made(folder: Path, note: str) -> bool:
    try:
        return (folder / "made_by").read_text() == note
    except OSError:
        return False


def is_ours(folder: Path) -> bool:
    """True if a folder may be written to: it is new, empty, or was made here."""
    return not folder.exists() or (folder / "made_by").exists() or (folder.is_dir() and not any(folder.iterdir()))


def made_by(seed: int, products: int) -> str:
    return f"{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()} --seed {seed} --products {products}\n"


def ensure(seed: int = 0, where: Path | None = None) -> Path:
    """The folder of the default catalogue, made on first use and again when this file has changed."""
    folder = (where or GENERATED) / f"webshop-{seed}"
    return folder if is_made(folder, made_by(seed, PRODUCTS)) else write(folder, seed, PRODUCTS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--products", type=int, default=PRODUCTS, help="above 2000 a crowd (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="default: data/generated/webshop-SEED, with --products -SEED-PRODUCTS")
    args = parser.parse_args()
    if not 1 <= args.products <= CROWD:
        parser.error(f"--products {args.products}: choose 1 to {CROWD}; up to {LARGEST} are such that reading pays")
    out = args.out or GENERATED / f"webshop-{args.seed}{f'-{args.products}' * (args.products != PRODUCTS)}"
    if not is_ours(out):
        parser.error(f"--out {out}: holds something else; name a new or empty folder")
    print(write(out, args.seed, args.products))
