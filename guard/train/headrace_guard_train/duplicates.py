"""Near duplicates among rows: so that none is learnt twice, nor judged by who has seen its like.

Texts are compared by their shingles, runs of five characters of the lower-case words. Which pairs
to compare is told by min-hashes in bands (Broder 1997; Leskovec et al., "Mining of Massive
Datasets", ch. 3): pairs as alike as `ALIKE_RATIO` share a band with a chance above .9.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headrace_guard_train.rows import Row

# Jaccard index of the shingles from which two texts say the same, or are of one make.
SAME_RATIO, ALIKE_RATIO = 0.8, 0.6
_SHINGLE = 5
_NUM_BANDS, _BAND = 32, 5
_SEED = 11
_WORDS = re.compile(r"\w+")
_PRIME = np.uint64((1 << 31) - 1)
# A band that so many texts share says only that they have a frame in common.
_MAX_BUCKET = 12
_NEAR_CHARS = 2000
Shingles = NDArray[np.uint32]


def without_doubles(rows: Sequence[Row]) -> list[Row]:
    """Return the rows without those that say what an earlier one of the source says already.

    Each is marked with the other sources that have a row much like it (`Row.near`), or in whose
    documents something much like it was planted.
    """
    near = [set(row.near) for row in rows]
    doubles: set[int] = set()
    for first, second, ratio in _pairs([row.text for row in rows]):
        one, other = rows[first], rows[second]
        if one.source == other.source:
            # Two documents with something planted differ in what was planted.
            if ratio >= SAME_RATIO and one.labels == other.labels and not other.spans:
                doubles.add(second)
        else:
            _mark(near, rows, first, second)
    planted = [idx for idx, row in enumerate(rows) if row.spans]
    for first, second, _ in _pairs([_planted(rows[idx]) for idx in planted]):
        _mark(near, rows, planted[first], planted[second])
    return [
        replace(row, near=frozenset(near[idx])) if near[idx] else row
        for idx, row in enumerate(rows)
        if idx not in doubles
    ]


def _planted(row: Row) -> str:
    (start, stop), *_ = row.spans
    return row.text[start:stop]


def _mark(near: Sequence[set[str]], rows: Sequence[Row], first: int, second: int) -> None:
    for one, other in ((first, second), (second, first)):
        if rows[one].source != rows[other].source:
            near[one].add(rows[other].source)


def _pairs(texts: Sequence[str]) -> Iterator[tuple[int, int, float]]:
    """Yield pairs of texts that are much alike, the earlier one first, and how alike they are."""
    shingles = [_shingles(text) for text in texts]
    for first, second in _candidates(shingles):
        ratio = _alike(shingles[first], shingles[second])
        if ratio >= ALIKE_RATIO:
            yield first, second, ratio


def _shingles(text: str) -> Shingles:
    words = " ".join(_WORDS.findall(text[:_NEAR_CHARS].lower()))
    codes = np.frombuffer(words.encode("utf-32-le"), np.uint32)
    if len(codes) < _SHINGLE:
        return np.array([_hash_of(codes)], np.uint32)
    total = np.zeros(len(codes) - _SHINGLE + 1, np.uint32)
    for offset in range(_SHINGLE):
        total = total * np.uint32(0x01000193) + codes[offset : offset + len(total)]
    return np.unique(total)


def _hash_of(codes: NDArray[np.uint32]) -> int:
    total = 0
    for code in codes.tolist():
        total = (total * 0x01000193 + code) % (1 << 32)
    return total


def _candidates(shingles: Sequence[Shingles]) -> Iterator[tuple[int, int]]:
    """Yield pairs of texts that share a band, each once, the earlier text first."""
    rng = np.random.default_rng(_SEED)
    factors = rng.integers(1, int(_PRIME), _NUM_BANDS * _BAND, np.uint64)[:, np.newaxis]
    offsets = rng.integers(0, int(_PRIME), _NUM_BANDS * _BAND, np.uint64)[:, np.newaxis]
    lowest = np.array(
        [((one.astype(np.uint64) * factors + offsets) % _PRIME).min(axis=1) for one in shingles]
    ).reshape(len(shingles), _NUM_BANDS * _BAND)
    seen: set[tuple[int, int]] = set()
    for band in range(_NUM_BANDS):
        buckets: dict[bytes, list[int]] = defaultdict(list)
        for idx, part in enumerate(lowest[:, band * _BAND : (band + 1) * _BAND]):
            mates = buckets[part.tobytes()]
            for mate in mates:
                if (mate, idx) not in seen:
                    seen.add((mate, idx))
                    yield mate, idx
            if len(mates) < _MAX_BUCKET:
                mates.append(idx)


def _alike(one: Shingles, other: Shingles) -> float:
    common = len(np.intersect1d(one, other, assume_unique=True))
    return common / (len(one) + len(other) - common)
