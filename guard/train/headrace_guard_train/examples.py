"""The windows that the dense stage learns from, with the labels of all heads at once."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace_guard.classifiers.cuts import Reading, read
from headrace_guard.classifiers.heads import HARM, INDIRECT, INJECTION, cut_of
from headrace_guard_train.rows import HARM_SOFT, Row

# An insertion longer than this was not found exactly.
_MAX_SPAN_CHARS = 600
_LEAST_OVERLAP_RATIO = 0.6
# Of short clean texts, the share that is shown as a sentence of a document too.
_NARROW_RATIO = 0.3


@dataclass(frozen=True, slots=True)
class Example:
    """One window.

    Args:
        text: what is read.
        labels: 1 or 0 by head; a head that is missing learns nothing from it.
        source: where it is from.
        row_idx: of which row.
        weight: share of the row.
        near: other sources with a row much like it.
    """

    text: str
    labels: Mapping[str, int]
    source: str
    row_idx: int
    weight: float
    near: frozenset[str] = frozenset()


def examples(rows: Sequence[Row], seed: int) -> list[Example]:
    """Return the windows of all rows: the first and last of a positive, any one of a clean text."""
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    found: list[Example] = []
    for idx, row in enumerate(rows):
        reading = read(row.text)
        wide = reading.windows(cut_of(INJECTION))
        if row.spans:
            found += _with_insertion(row, idx, reading, rng)
            continue
        picked = wide if len(wide) <= 2 else [wide[0], wide[-1]]
        if 1 not in row.labels.values():
            picked = [rng.choice(wide)]
        labels = {
            head: label
            for head, label in row.labels.items()
            if head != HARM_SOFT and (head != INDIRECT or label == 1)
        }
        found += [
            Example(reading.text[begin:end], labels, row.source, idx, 1 / len(picked), row.near)
            for begin, end in picked
        ]
        if row.labels.get(INDIRECT) == 0:
            found += _sentences(row, idx, reading, rng)
    return found


def _with_insertion(row: Row, idx: int, reading: Reading, rng: random.Random) -> list[Example]:
    start, stop = row.spans[0]
    if stop - start > _MAX_SPAN_CHARS:
        return []
    inside: list[tuple[int, int]] = []
    outside: list[tuple[int, int]] = []
    for begin, end in reading.windows(cut_of(INDIRECT)):
        first, last = reading.span(begin, end)
        overlap = min(last, stop) - max(first, start)
        if overlap >= _LEAST_OVERLAP_RATIO * min(stop - start, end - begin):
            inside.append((begin, end))
        elif overlap <= 0:
            outside.append((begin, end))
    picked = [(place, row.labels[INDIRECT]) for place in inside[:2]]
    picked += [(rng.choice(outside), 0)] if outside else []
    return [
        Example(reading.text[begin:end], {INDIRECT: label}, row.source, idx, 1.0, row.near)
        for (begin, end), label in picked
    ]


def _sentences(row: Row, idx: int, reading: Reading, rng: random.Random) -> list[Example]:
    narrow = reading.windows(cut_of(INDIRECT))
    return [
        Example(reading.text[begin:end], {INDIRECT: 0}, row.source, idx, 0.5, row.near)
        for begin, end in rng.sample(narrow, min(2, len(narrow)))
        if len(reading.text) > cut_of(HARM).num_chars or rng.random() < _NARROW_RATIO
    ]
