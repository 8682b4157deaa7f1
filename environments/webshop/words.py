"""The comparison of words in WebShop's reward: option values by a fuzzy ratio and by colour, titles by their nouns."""

import re
import string
from difflib import SequenceMatcher
from functools import lru_cache
from pathlib import Path
from typing import Any

from .catalogue import read_json

COLOR_WORDS = """
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo
caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal
dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory
ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom
mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire
seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white
wine yellow"""
COLORS = COLOR_WORDS.split()
LATIN_1 = dict.fromkeys(range(128, 256))


@lru_cache(maxsize=1 << 16)
def token_set(text: str) -> frozenset[str]:
    return frozenset(re.sub(r"\W", " ", text.translate(LATIN_1)).lower().split())


@lru_cache(maxsize=1 << 18)
def similar(a: str, b: str) -> bool:
    """thefuzz's `token_set_ratio` above 85, with difflib as where python-Levenshtein is missing (rapidfuzz differs)."""
    first, second = token_set(a), token_set(b)
    if not first or not second:
        return False
    common = " ".join(sorted(first & second))
    one = (common + " " + " ".join(sorted(first - second))).strip()
    two = (common + " " + " ".join(sorted(second - first))).strip()
    pairs = [(common, one), (common, two), (one, two)]
    return any(x and y and round(100 * SequenceMatcher(None, x, y).ratio()) > 85 for x, y in pairs)


@lru_cache(maxsize=1 << 16)
def plain_color(value: str | tuple[str, str]) -> str:
    """The first colour word found in an option's value replaces it all: "dark blue" -> "blue", "standard" -> "tan".

    The (name, value) pairs of synthetic goals hold a colour only if one of the two *is* the word.
    """
    return next((color for color in COLORS if color in value), str(value))


FUNCTION_WORDS = """
a about above across after all also am an and any are around as at be because been before behind below between both
but by can could do does down each either every few for from had has have he her here him his how i if in inside into
is it its just many may me more most much must my near no nor not of off on only onto or other our out outside over
own per shall she should so some such than that the their them then there these they this those through to too under
until up upon us very via was we were what when where which while who whose will with within without would you your"""
NO_NOUNS = frozenset(FUNCTION_WORDS.split())


def rule_nouns(title: str) -> list[str]:
    """A stand-in for a tagger: every word that starts with a letter and is no function word counts as a noun."""
    pieces = re.split(r"[\s/&|()\[\]{}\"“”+*~:;!?]+|(?<=\w)[-–—](?=[^\W\d])|,\s|'s\b|’s\b", title.lower())
    bare = (piece.strip(string.punctuation + "–—…，。、™®©") for piece in pieces if piece)
    return [word for word in bare if word[:1].isalpha() and word not in NO_NOUNS]


def noun_finder(source: str | Path | None) -> Any:
    """A function product -> lower-cased nouns of its title: by a tagger ("spacy:en_core_web_sm" is WebShop's own,
    "spacy:en_core_web_lg" ETO's), from a file {asin: [noun, ...]}, or by `rule_nouns`. Only the reward for buying
    another product than the goal's depends on the choice (r_type changes in about 5 % of those purchases)."""
    if source is None:
        return lambda product: rule_nouns(product.title)
    kind, _, model = str(source).partition(":")
    if kind == "spacy":
        import spacy

        tag = spacy.load(model, exclude=["parser", "ner", "lemmatizer"])
        return lambda product: [t.text.lower() for t in tag(product.title) if t.pos_ in ("NOUN", "PROPN")]
    recorded = read_json(Path(source))
    return lambda product: recorded[product.asin] if product.asin in recorded else rule_nouns(product.title)
