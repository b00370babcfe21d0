"""Cuts rows into the windows that heads learn from, exactly as serving cuts them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_guard.classifiers.cuts import WIDE, Reading, read
from headrace_guard.classifiers.heads import INDIRECT, cut_of, within
from headrace_guard.classifiers.ngrams import Features, features
from headrace_guard_train.rows import Row

# An insertion longer than this was not found exactly; which window holds it is not known.
_MAX_SPAN_CHARS = 600
_LEAST_OVERLAP_RATIO = 0.6
# Of a text whose windows all have one label, so many are learnt from.
_MAX_WINDOWS = 3


@dataclass(frozen=True, slots=True)
class Instance:
    """One window.

    Args:
        text: what is read.
        buckets: its n-gram features.
        row_idx: which row it is from.
        label: 1 or 0; None = not known, judged but not learnt from.
        weight: share of the row.
    """

    text: str
    buckets: NDArray[np.int32]
    row_idx: int
    label: int | None
    weight: float


def capped(
    rows: Sequence[Row],
    caps: Mapping[str, int],
    default: int,
    seed: int,
    later: frozenset[str] = frozenset(),
) -> list[Row]:
    """Return rows in random order, of each source and set of labels no more than its cap.

    Args:
        rows: all there are.
        caps: by source.
        default: cap of a source that is not named.
        seed: of the order.
        later: sources that come last: adding one changes nothing of what is taken of others.
    """
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    order = [row for row in rows if row.source not in later]
    added = [row for row in rows if row.source in later]
    rng.shuffle(order)
    rng.shuffle(added)
    order += added
    taken: Counter[tuple[str, tuple[tuple[str, int], ...]]] = Counter()
    kept: list[Row] = []
    for row in order:
        key = (row.source, tuple(sorted(row.labels.items())))
        if taken[key] < caps.get(row.source, default):
            taken[key] += 1
            kept.append(row)
    return kept


class Cutter:
    """Cuts rows; what is read of a text is made once for all heads."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self._read: dict[int, tuple[Reading, Features]] = {}

    def instances(self, head: str) -> list[Instance]:
        """Return the windows of all rows that the head knows a label of."""
        found: list[Instance] = []
        for idx, row in enumerate(self.rows):
            if head in row.labels:
                found += _of(row, idx, head, *self._reading(idx))
        return found

    def _reading(self, idx: int) -> tuple[Reading, Features]:
        if idx not in self._read:
            reading = read(self.rows[idx].text)
            self._read[idx] = reading, features(reading.text)
        return self._read[idx]


def _of(row: Row, idx: int, head: str, reading: Reading, all_features: Features) -> list[Instance]:
    found = []
    for begin, end, label, weight in _labelled(row, reading, head):
        buckets = within(all_features, begin, end)
        found.append(Instance(reading.text[begin:end], buckets, idx, label, weight))
    return found


def _labelled(row: Row, reading: Reading, head: str) -> list[tuple[int, int, int | None, float]]:
    label = row.labels[head]
    # Of an attack that is no document not every sentence is one.
    is_whole = label == 1 and not row.spans
    windows = reading.windows(WIDE if is_whole else cut_of(head))
    if not row.spans or label == 0:
        if len(windows) > _MAX_WINDOWS and head != INDIRECT:
            windows = [windows[0], windows[len(windows) // 2], windows[-1]]
        return [(begin, end, label, 1 / len(windows)) for begin, end in windows]
    start, stop = row.spans[0]
    is_exact = stop - start <= _MAX_SPAN_CHARS
    found: list[tuple[int, int, int | None, float]] = []
    for begin, end in windows:
        first, last = reading.span(begin, end)
        overlap = min(last, stop) - max(first, start)
        holds = overlap >= _LEAST_OVERLAP_RATIO * min(stop - start, end - begin)
        is_unsure = not is_exact or (overlap > 0 and not holds)
        known = None if is_unsure else int(holds)
        found.append((begin, end, known, 1.0 if known else 1 / len(windows)))
    return found
