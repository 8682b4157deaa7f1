"""WebShop's product search: Lucene's English analysis and BM25, without Java.

Equal to the original's top 50 on every recorded query, which takes all of: the tokenizer's word breaks, Porter's
stemmer with its author's two later rules, document lengths stored with four significant bits, and 32-bit scores.
The index is flat arrays in compressed-row layout, so that its size is that of the postings; they may be mapped files.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import snowballstemmer

K1, B, TOP = np.float32(0.9), np.float32(0.4), 50
BLOCK = 512  # documents
STOP = """
a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to was
will with"""
STOP_WORDS = frozenset(STOP.split())

# --------------------------------------------------------------------------------------------------- words of a text
# Unicode's word-break rules (UAX 29) on a string of one class letter per character:
# L letter, N digit, _ connector, K katakana, I ideograph, E pictograph, R regional indicator, x combining, z joiner,
# m / d / q punctuation that joins two letters / two digits / both, blank for the rest.
WORD = re.compile(
    r"(?:L[xz]*(?:[mq][xz]*(?=L))?|N[xz]*(?:[dq][xz]*(?=N))?|_[xz]*)+|(?:K[xz]*)+|I[xz]*|E[xz]*(?:(?<=z)E[xz]*)*|RR"
)
JOINERS = {
    **dict.fromkeys(":·\u0387\u055f\u05f4\u2027\ufe13\ufe55\uff1a", "m"),
    **dict.fromkeys(",;\u037e\u0589\u060c\u060d\u066c\u07f8\u2044\ufe10\ufe14\ufe50\ufe54\uff0c\uff1b", "d"),
    **dict.fromkeys(".'\u2018\u2019\u2024\ufe52\uff07\uff0e", "q"),
    **dict.fromkeys("\uff9e\uff9f", "x"),
    "\u200d": "z",
    "\u200b": " ",
}
# Extended_Pictographic of Unicode 11, the version that Lucene 8 was built with.
PICTOGRAPHS = """
a9 ae 203c 2049 2122 2139 2194-2199 21a9-21aa 231a-231b 2328 2388 23cf 23e9-23f3 23f8-23fa 24c2 25aa-25ab 25b6 25c0
25fb-25fe 2600-2605 2607-2612 2614-2685 2690-2705 2708-2712 2714 2716 271d 2721 2728 2733-2734 2744 2747 274c 274e
2753-2755 2757 2763-2767 2795-2797 27a1 27b0 27bf 2934-2935 2b05-2b07 2b1b-2b1c 2b50 2b55 3030 303d 3297 3299
1f000-1f0ff 1f10d-1f10f 1f12f 1f16c-1f171 1f17e-1f17f 1f18e 1f191-1f19a 1f1ad-1f1e5 1f201-1f20f 1f21a 1f22f
1f232-1f23a 1f23c-1f23f 1f249-1f3fa 1f400-1f53d 1f546-1f64f 1f680-1f6ff 1f774-1f77f 1f7d5-1f7ff 1f80c-1f80f
1f848-1f84f 1f85a-1f85f 1f888-1f88f 1f8ae-1f8ff 1f90c-1f93a 1f93c-1f945 1f947-1fffd"""
SPANS = [[int(end, 16) for end in span.split("-")] for span in PICTOGRAPHS.split()]


def word_class(char: str) -> str:
    if char in JOINERS:
        return JOINERS[char]
    code, category = ord(char), unicodedata.category(char)
    if 0x1F1E6 <= code <= 0x1F1FF:
        return "R"
    if any(span[0] <= code <= span[-1] for span in SPANS):
        return "E"
    if category in ("Mn", "Mc", "Me", "Cf") or 0x1F3FB <= code <= 0x1F3FF:  # the latter: skin tones
        return "x"
    if category == "Nd":
        return "N"
    if category[0] == "L" or category == "Nl":
        script = unicodedata.name(char, "").split(" ")[0].split("-")[0]
        return {"CJK": "I", "HIRAGANA": "I", "KATAKANA": "K", "HALFWIDTH": "K"}.get(script, "L")
    return "_" if category == "Pc" else " "


class WordClasses(dict):
    """A table for str.translate that fills itself: code point -> class letter."""

    def __missing__(self, code: int) -> str:
        self[code] = word_class(chr(code))
        return self[code]


CLASSES = WordClasses()


# The same rules for ASCII text, where a character says its class: most text, and four times as fast.
ASCII_WORD = re.compile(r"(?:[A-Za-z]+(?:[:.'](?=[A-Za-z]))?|[0-9]+(?:[,;.'](?=[0-9]))?|_+)+")


def words(text: str) -> list[str]:
    if text.isascii():
        return ASCII_WORD.findall(text)
    return [text[match.start() : match.end()] for match in WORD.finditer(text.translate(CLASSES))]


_porter = snowballstemmer.stemmer("porter").stemWord
MEASURED = re.compile(r"[aeiouy][^aeiou]")  # Porter's m > 0, near enough in front of the two endings below


@lru_cache(maxsize=1 << 20)
def term(word: str) -> str | None:
    """The index term of a word; None for a stop word and for underscores alone."""
    word = word[:-2] if word[-2:] in ("'s", "’s", "＇s") else word
    if word in STOP_WORDS or not word.strip("_"):
        return None
    if len(word) <= 2:
        return word
    stem = _porter(word)
    if stem.endswith("bli") and MEASURED.search(stem[:-3]):
        return _porter(stem[:-1] + "e")  # bli -> ble, then the later steps: incredibly -> incredibl -> incred
    if stem.endswith("logi") and MEASURED.search(stem[:-4]):
        return stem[:-1]
    return stem


def terms(text: str) -> list[str]:
    """Lucene's StandardTokenizer, possessive, lower-case, stop-word and Porter filters."""
    return [*filter(None, map(term, words(text.lower())))]


# ------------------------------------------------------------------------------------------------------------- BM25
def stored_length(n: np.ndarray) -> np.ndarray:
    """Document lengths as Lucene's one byte keeps them: exact below 40, then 24 + four significant bits of n - 24."""
    rest = np.maximum(n - 24, 16)
    step = 1 << (np.floor(np.log2(rest)).astype(np.int64) - 3)
    return np.where(n < 40, n, 24 + rest // step * step)


class Indexer:
    """Counts the terms of documents, one document after the other, and makes the index of them all."""

    def __init__(self) -> None:
        self.vocabulary: dict[str, int] = defaultdict(itertools.count().__next__)  # in order of appearance
        self.term, self.tf, self.distinct, self.length = array("i"), array("i"), array("i"), array("q")

    def add(self, text: str) -> None:
        counts = Counter(terms(text))
        self.term.extend(map(self.vocabulary.__getitem__, counts))
        self.tf.extend(counts.values())
        self.distinct.append(len(counts))
        self.length.append(sum(counts.values()))

    def finish(self, rank: np.ndarray) -> tuple[list[str], dict[str, np.ndarray]]:
        """The terms, sorted, and the arrays of SearchIndex; rank (n,): of each document, for ties."""
        words, n = sorted(self.vocabulary), len(self.length)
        place = np.empty(len(words), np.int64)
        place[[self.vocabulary[word] for word in words]] = np.arange(len(words))
        posting = place[np.array(self.term)]
        df = np.bincount(posting, minlength=len(words))
        posting = posting * n + np.repeat(rank, np.array(self.distinct))
        order = np.argsort(posting)
        docs = (posting[order] % max(n, 1)).astype(np.int32)
        length = np.empty(n, np.int64)
        length[rank] = np.array(self.length)
        average = np.float32(length.mean() if len(docs) else 1.0)
        norm = 1 / (K1 * ((1 - B) + B * stored_length(length).astype(np.float32) / average))
        damping = 1 + np.array(self.tf)[order].astype(np.float32) * norm[docs]
        offsets = np.concatenate([[0], np.cumsum(df)])
        idf = np.log(1 + (n - df + 0.5) / (df + 0.5)).astype(np.float32)
        arrays = (offsets, docs, damping, idf)
        return words, dict(zip(ARRAYS, arrays, strict=True))


ARRAYS = ("offsets", "docs", "damping", "idf")


class SearchIndex:
    """BM25 over `size` documents in the order in which ties are to be broken.

    find: term -> v or None. offsets (V + 1,): the postings of term v are [offsets[v], offsets[v + 1]); docs (P,): their
    documents; damping (P,): 1 + tf / (k1 (1 - b + b dl / avgdl)), so that a posting's score is w - w / damping,
    w = qtf * idf.
    """

    def __init__(self, size: int, find: Callable[[str], int | None], **arrays: np.ndarray) -> None:
        self.size, self.find = size, find
        self.offsets, self.docs, self.damping, self.idf = (arrays[name] for name in ARRAYS)

    def top(self, query: str, k: int = TOP) -> tuple[np.ndarray, np.ndarray]:
        """The k best documents and their scores (float32), best first."""
        total = np.zeros(self.size)
        for t, count in Counter(terms(query)).items():
            if (v := self.find(t)) is not None:
                where = slice(self.offsets[v], self.offsets[v + 1])
                weight = np.float32(count) * self.idf[v]
                total[self.docs[where]] += weight - weight / self.damping[where]
        scores = total.astype(np.float32)
        # The k best documents are at least as good as the k-th best of the blocks' best ones: of a million documents a
        # few thousand are left to sort. A document without any of the words has 0.
        tops = scores[: self.size // BLOCK * BLOCK].reshape(-1, BLOCK).max(axis=1)
        least = np.partition(tops, -k)[-k] if len(tops) >= k else 0
        hits = np.flatnonzero(scores >= max(least, np.finfo(np.float32).tiny))
        best = hits[np.argsort(-scores[hits], kind="stable")[:k]]
        return best, scores[best]
