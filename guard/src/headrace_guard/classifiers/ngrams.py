"""Hashed character and word n-grams of a text, for linear heads; numpy alone, no loop over text.

Per position of the text there are features for the characters that begin there (3, 4 and 5 of them)
and, where a word begins, for the word, the pair and the triple of words that begins with it. Each
is hashed into one of ``NUM_BUCKETS``. Training and serving both call `features`, so they cannot
differ. Hashing trick: Weinberger et al. 2009, "Feature Hashing for Large Scale Multitask Learning".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BUCKET_BITS = 18
NUM_BUCKETS = 1 << BUCKET_BITS
CHAR_SIZES = (3, 4, 5)
# Words are hashed by their first so many characters.
_MAX_WORD_CHARS = 48
_SHIFT = np.uint32(32 - BUCKET_BITS)
_MIX = np.uint32(2_654_435_761)
_CHAR_PRIMES = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1], np.uint32)
_POWERS = np.cumprod(np.full(_MAX_WORD_CHARS, 0x01000193, np.uint32), dtype=np.uint32)
_PAIR, _TRIPLE = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)


def _word_table() -> NDArray[np.bool_]:
    table = np.array([chr(code).isalnum() or chr(code) in "'_" for code in range(0x3100)])
    table[0x2000:0x2070] = False
    return table


_IS_WORD = _word_table()


@dataclass(frozen=True, slots=True)
class Features:
    """Features of one text, by position.

    Args:
        buckets: what each hashes to.
        positions: index of the character at which each begins.
        num_chars: length of the text.
    """

    buckets: NDArray[np.int32]
    positions: NDArray[np.int32]
    num_chars: int


def features(text: str) -> Features:
    """Return the features of a folded text (case folded, single spaces)."""
    codes = np.frombuffer(f" {text} ".encode("utf-32-le", "surrogatepass"), np.uint32)
    hashes: list[NDArray[np.uint32]] = []
    places: list[NDArray[np.int32]] = []
    products = [codes * prime for prime in _CHAR_PRIMES]
    for size in CHAR_SIZES:
        num = len(codes) - size + 1
        if num <= 0:
            continue
        total = np.full(num, size, np.uint32)
        for offset in range(size):
            total += products[offset][offset : offset + num]
        hashes.append(total)
        places.append(np.arange(num, dtype=np.int32))
    _add_words(codes, hashes, places)
    if not hashes:
        return Features(np.empty(0, np.int32), np.empty(0, np.int32), len(text))
    mixed = np.concatenate(hashes)
    mixed ^= mixed >> np.uint32(15)
    mixed *= _MIX
    buckets = (mixed >> _SHIFT).astype(np.int32)
    # The space put before the text has no position of its own.
    positions = np.clip(np.concatenate(places) - 1, 0, max(len(text) - 1, 0))
    return Features(buckets, positions.astype(np.int32), len(text))


def _add_words(
    codes: NDArray[np.uint32],
    hashes: list[NDArray[np.uint32]],
    places: list[NDArray[np.int32]],
) -> None:
    is_word = _IS_WORD[np.minimum(codes, len(_IS_WORD) - 1)]
    edges = np.flatnonzero(is_word[1:] != is_word[:-1]) + 1
    # Text is padded with spaces, so edges come in pairs: begin, end.
    begins, ends = edges[::2], edges[1::2]
    if not len(begins):
        return
    lengths = ends - begins
    inside = np.flatnonzero(is_word)
    offsets = np.arange(len(inside)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    kept = np.minimum(offsets, _MAX_WORD_CHARS - 1)
    terms = (codes[inside] + np.uint32(0x9E37)) * _POWERS[kept]
    words = np.add.reduceat(terms, np.cumsum(lengths) - lengths, dtype=np.uint32)
    words ^= words >> np.uint32(13)
    places_of_words = begins.astype(np.int32)
    hashes.append(words)
    places.append(places_of_words)
    if len(words) > 1:
        pairs = words[:-1] * _PAIR + (words[1:] ^ _TRIPLE)
        hashes.append(pairs)
        places.append(places_of_words[:-1])
    if len(words) > 2:
        triples = (words[:-2] * _PAIR + words[1:-1]) * _TRIPLE + words[2:]
        hashes.append(triples)
        places.append(places_of_words[:-2])
