"""Hashed character and word n-grams of a text, for linear heads; numpy alone, no loop over text.

Per position of the text there are features for the characters that begin there (3, 4 and 5 of them)
and, where a word begins, for the word, the pair and the triple of words that begins with it. Each
is hashed into one of ``NUM_BUCKETS``. Training and serving both call `features`, so they cannot
differ. Hashing trick: Weinberger et al. 2009, "Feature Hashing for Large Scale Multitask Learning".
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

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
    """Features of one text: one group a kind, and by position within a group.

    Args:
        buckets: what each hashes to.
        positions: index of the character at which each begins.
        num_chars: length of the text.
        groups: where each group ends.
    """

    buckets: NDArray[np.int32]
    positions: NDArray[np.int32]
    num_chars: int
    groups: tuple[int, ...]


def features(text: str) -> Features:
    """Return the features of a folded text (case folded, single spaces)."""
    codes = np.frombuffer(f" {text} ".encode("utf-32-le", "surrogatepass"), np.uint32)
    grams = _chars(codes)
    words, begins = _words(codes)
    # The space put before the text has no position of its own.
    places = np.arange(-1, len(text), dtype=np.int32)
    places[0] = 0
    kinds = [(gram, places[: len(gram)]) for gram in grams]
    kinds += [(hashes, begins[: len(hashes)]) for hashes in _phrases(words)]
    mixed = np.concatenate([hashes for hashes, _ in kinds])
    mixed ^= mixed >> np.uint32(15)
    mixed *= _MIX
    mixed >>= _SHIFT
    positions = np.concatenate([where for _, where in kinds])
    groups = tuple(accumulate(len(hashes) for hashes, _ in kinds))
    return Features(mixed.view(np.int32), positions, len(text), groups)


def _chars(codes: NDArray[np.uint32]) -> list[NDArray[np.uint32]]:
    """Return the hashes of the runs of each size, one a position."""
    grams: list[NDArray[np.uint32]] = []
    total = codes * _CHAR_PRIMES[0]
    for size in range(2, max(CHAR_SIZES) + 1):
        num = max(len(codes) - size + 1, 0)
        total = total[:num] + codes[size - 1 :] * _CHAR_PRIMES[size - 1]
        if size in CHAR_SIZES:
            grams.append(total + np.uint32(size))
    return grams


def _words(codes: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray[np.int32]]:
    """Return each word's hash and the position at which it begins."""
    is_word = _IS_WORD.take(codes, mode="clip")
    edges = np.flatnonzero(is_word[1:] != is_word[:-1])
    # Text is padded with spaces, so edges come in pairs: begin, end. The padding has no position.
    begins, lengths = edges[::2], edges[1::2] - edges[::2]
    if not len(begins):
        return np.empty(0, np.uint32), np.empty(0, np.int32)
    firsts = np.cumsum(lengths) - lengths
    letters = codes[is_word]
    offsets = np.arange(len(letters)) - np.repeat(firsts, lengths)
    terms = (letters + np.uint32(0x9E37)) * _POWERS.take(offsets, mode="clip")
    words = np.add.reduceat(terms, firsts, dtype=np.uint32)
    words ^= words >> np.uint32(13)
    return words, begins.astype(np.int32)


def _phrases(words: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], ...]:
    """Return the hashes of single words, pairs and triples, each by its first word."""
    pairs = words[:-1] * _PAIR + (words[1:] ^ _TRIPLE)
    triples = (words[:-2] * _PAIR + words[1:-1]) * _TRIPLE + words[2:]
    return words, pairs, triples
