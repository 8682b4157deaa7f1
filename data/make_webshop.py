"""The bundled WebShop catalogue: made-up products in WebShop's own files, so that a fresh clone has a shop to run.

    python data/make_webshop.py [--seed 0] [--products 1500] [--out data/generated/webshop-0]

Writes `items_shuffle.json`, `items_ins_v2.json`, `items_human_ins.json` (WebShop's schema, data/README.md) and
`title_nouns.json` (asin -> what the title names, for the type part of the reward). The same seed gives the same bytes.

What makes the choice real: products come in families of six of one kind ("jacket") that share their options. Of three
attributes a, b, c each of {a, b}, {b, c}, {a, c} has a member that shoppers are sent for, and beside it one that is too
dear, or lacks both, or is as good. Sent for "a padded lined jacket with color: red, and size: large, and price lower
than 60.00 dollars":

    Norda padded lined beaded jacket      $34.0
    Velmo lined padded zipped jacket      $76.0    too dear
    Tarvo beaded lined quilted jacket     $31.0    "It has no padding."

Search counts words (`padding` and `padded` are one to it), so a text that denies an attribute is found as well as one
that has it, and the family fills the first results page in no telling order. An instruction names two attributes and
never the brand; no other has this kind with these two, so splits by product share no instruction. The vocabulary is
closed and small (about 250 words), attributes and values are single words: a model of a million parameters, trained
from scratch, can read it.
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
import tempfile
from collections.abc import Iterator
from pathlib import Path

GENERATED = Path(__file__).parent / "generated"

COLORS = "red blue green black white yellow pink brown"
SIZES = "small medium large huge"

# category: (kinds, attributes, {option: values}), words parted by blanks. An attribute comes with the noun of what is
# missing without it: search reduces both to one stem, the reward takes neither for the other.
SHELVES: dict[str, tuple[str, str, dict[str, str]]] = {
    "fashion": (
        "jacket shirt sweater dress skirt coat scarf hat belt vest",
        "padded:padding lined:lining quilted:quilting buttoned:buttons zipped:zip pocketed:pockets pleated:pleats"
        " fringed:fringe beaded:beads ruffled:ruffles",
        {"color": COLORS, "size": SIZES, "pattern": "plain striped dotted floral"},
    ),
    "beauty": (
        "shampoo lotion balm soap serum lipstick perfume mask toner conditioner",
        "foaming:foam tinted:tint shimmering:shimmer oiled:oil medicated:medication moisturizing:moisturizer"
        " exfoliating:exfoliation powdered:powder waxed:wax sugared:sugar",
        {"scent": "jasmine vanilla citrus cedar musk apple", "size": SIZES, "package": "tube jar pump"},
    ),
    "grocery": (
        "cookie cracker muffin pretzel bagel cake pie soup sauce salad",
        "salted:salt smoked:smoke sweetened:sweetener frosted:frosting glazed:glaze filled:filling spiced:spice"
        " buttered:butter sugared:sugar preserved:preservatives",
        {"flavor": "honey ginger almond maple garlic pepper", "size": SIZES, "pack": "single double triple"},
    ),
    "electronics": (
        "speaker headset charger keyboard camera monitor radio router printer projector",
        "wired:wires lighted:lights shielded:shield cushioned:cushion folding:fold mounted:mount amplified:amplifier"
        " filtered:filter insulated:insulation recording:recorder",
        {"color": COLORS, "power": "low middle high", "plug": "american british european"},
    ),
    "garden": (
        "chair table lamp rug shelf mirror pillow curtain vase basket",
        "carved:carving framed:frame wheeled:wheels cushioned:cushion weighted:weights gilded:gilding"
        " lacquered:lacquer folding:fold tiled:tiles painted:paint",
        {"color": COLORS, "shape": "round square oval", "finish": "matte glossy brushed"},
    ),
}
BRANDS = "Norda Velmo Tarvo Kesta Brivo Zelka Ombri Junta Pelix Sarto Wexla Dovik Fenlo Galtu Hirma Mirto Rovka"
USES = "home work travel"
OPENINGS = ("find me", "i need", "i want", "i am looking for")
FAMILY = 6
CODES = 26_000  # A000 to Z999


def nouns_of(category: str) -> dict[str, str]:
    """attribute -> the noun of what a product without it lacks."""
    return dict(pair.split(":") for pair in SHELVES[category][1].split())


def instruct(rng: random.Random, words: list[str]) -> str:
    """'i need a cotton waterproof jacket'; the shop adds the options and the price limit."""
    article = "an" if words[0][0] in "aeiou" else "a"
    return f"{rng.choice(OPENINGS)} {article} {' '.join(words)}"


def triples(rng: random.Random, attributes: list[str]) -> Iterator[tuple[str, str, str]]:
    """All triples of attributes in random order; first those that share no pair with one before them."""
    later, pairs = [], set()
    for triple in rng.sample(everything := list(itertools.combinations(attributes, 3)), len(everything)):
        if pairs.isdisjoint(own := set(itertools.combinations(triple, 2))):
            pairs |= own
            yield triple
        else:
            later.append(triple)
    yield from later


def family(rng: random.Random, category: str, kind: str, triple: tuple[str, ...], asked: set[frozenset]) -> list[dict]:
    """Six products as records with the keys of WebShop's files (and `pair`: what an instruction asks for).

    `asked`: the pairs that instructions for this kind ask for; a product has none of them by chance.
    """
    groups, missing = SHELVES[category][2], nouns_of(category)
    names = sorted(groups) if rng.random() < 0.8 else sorted(rng.sample(sorted(groups), 2))
    values = {name: rng.sample(groups[name].split(), 4 if len(groups[name].split()) > 4 else 3) for name in names}
    options = {name: [{"value": value, "image": None} for value in values[name]] for name in names}
    brands = rng.sample(BRANDS.split(), FAMILY)
    tens = rng.randint(1, 4)
    members = []
    for pair in itertools.combinations(triple, 2):
        for role in ("wanted", rng.choice(("too dear", "too dear", "lacks both", "as good"))):
            has = [attribute for attribute in triple if (attribute in pair) != (role == "lacks both")]
            own = list(has)
            for other in rng.sample(sorted(missing), len(missing)):
                if len(own) < 3 and other not in triple and asked.isdisjoint(frozenset((other, a)) for a in own):
                    own.append(other)
            rng.shuffle(own)
            # The limit of a goal is at most the fourth multiple of ten above the price, so four tens more is too dear.
            price = 10 * tens + rng.randint(1, 9) + (40 if role == "too dear" else 0)
            praise = [f"A {kind} for {use}." for use in rng.sample(USES.split(), rng.randint(0, 3))]
            denial = [f"It has no {missing[attribute]}." for attribute in triple if attribute not in has]
            members.append(
                {
                    "name": " ".join([brands[-1], *own, kind]),
                    "full_description": " ".join([f"Made by {brands.pop()}.", *praise, *denial]),
                    "small_description": rng.sample(own, len(own)),
                    "pricing": f"${price}.00",
                    "customization_options": options,
                    "category": category,
                    "query": kind,
                    "product_category": f"{category} › {kind}",
                    "images": [""],
                    "attributes": own,
                    "pair": rng.sample(pair, 2) if role == "wanted" else None,
                }
            )
    return members


def catalogue(seed: int = 0, products: int = 1500) -> dict[str, object]:
    """File name -> content. `products` is rounded up to whole families."""
    rng = random.Random(f"webshop {seed}")
    shelves = [(category, kind) for category, (kinds, _, _) in SHELVES.items() for kind in kinds.split()]
    families = -(-products // FAMILY)
    members = []
    for number, (category, kind) in enumerate(shelves):
        count = families // len(shelves) + (number < families % len(shelves))
        chosen = list(itertools.islice(triples(rng, list(nouns_of(category))), count))
        asked = {frozenset(pair) for triple in chosen for pair in itertools.combinations(triple, 2)}
        for triple in chosen:
            members += family(rng, category, kind, triple, asked)
    rng.shuffle(members)
    codes = rng.sample(range(CODES), len(members))
    items, attributes, human, nouns, asked = [], {}, {}, {}, set()
    for code, product in zip(codes, members, strict=True):
        asin = f"{chr(ord('A') + code // 1000)}{code % 1000:03d}"
        pair, kind = product.pop("pair"), product["query"]
        attributes[asin] = {"attributes": product.pop("attributes")}
        nouns[asin] = [kind]
        items.append({"asin": asin, **product})
        if pair and (kind, *sorted(pair)) not in asked:
            asked.add((kind, *sorted(pair)))
            attributes[asin] |= {"instruction": instruct(rng, [*pair, kind]), "instruction_attributes": pair}
            wanted = [rng.choice(values)["value"] for values in product["customization_options"].values()]
            text = f"{instruct(rng, [*pair, kind])} that is {' and '.join(wanted)}"
            human[asin] = [
                {"asin": asin, "instruction": text, "instruction_attributes": pair, "instruction_options": wanted}
            ]
    return {
        "items_shuffle.json": items,
        "items_ins_v2.json": attributes,
        "items_human_ins.json": human,
        "title_nouns.json": nouns,
    }


def write(folder: Path, seed: int, products: int) -> Path:
    """Write the catalogue to `folder`, whole or not at all: a reader never meets half of it, and writers may race."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    fresh.chmod(0o755)
    for name, content in catalogue(seed, products).items():
        (fresh / name).write_text(json.dumps(content, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
    (fresh / "made_by").write_text(made_by(seed, products))
    while not is_made(folder, seed, products):
        try:
            os.rename(fresh, folder)  # works if there is none, or an empty one
        except OSError:
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
            with contextlib.suppress(FileNotFoundError):  # another writer has moved it away
                os.rename(folder, old)
            shutil.rmtree(old)
    shutil.rmtree(fresh, ignore_errors=True)
    return folder


def made_by(seed: int, products: int) -> str:
    return f"{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()} --seed {seed} --products {products}\n"


def is_made(folder: Path, seed: int, products: int) -> bool:
    note = folder / "made_by"
    return note.exists() and note.read_text() == made_by(seed, products)


def ensure(seed: int = 0) -> Path:
    """The folder of the default catalogue, made on first use and again when this file has changed."""
    folder = GENERATED / f"webshop-{seed}"
    return folder if is_made(folder, seed, 1500) else write(folder, seed, 1500)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--products", type=int, default=1500, help="at least; families of six (default: 1500)")
    parser.add_argument("--out", type=Path, help="folder (default: data/generated/webshop-SEED)")
    args = parser.parse_args()
    if not 1 <= args.products <= CODES - FAMILY:
        parser.error(
            f"--products {args.products}: choose 1 to {CODES - FAMILY} (item ids are a letter and three digits)"
        )
    out = args.out or GENERATED / f"webshop-{args.seed}"
    if out.exists() and not (out / "made_by").exists() and not (out.is_dir() and not any(out.iterdir())):
        parser.error(f"--out {out}: holds something else; name a new or empty folder")
    print(write(out, args.seed, args.products))
