"""Linear heads over hashed n-grams: a logit for every window of a text, all heads in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from headrace_guard.classifiers.cuts import NARROW, WIDE, Cut, Reading
from headrace_guard.classifiers.ngrams import Features, features

INJECTION, INDIRECT, HARM, TOXICITY = "injection", "indirect", "harm", "toxicity"
HEADS = (INJECTION, INDIRECT, HARM, TOXICITY)
# What is asked for stands in one sentence, whatever polite ones stand around it. A sentence must be
# so much worse than a whole text: there are more of them.
SENTENCE_HEADS = frozenset({HARM})
SENTENCE_MARGIN = 1.5


def cut_of(head: str) -> Cut:
    """Return how a head cuts texts."""
    return NARROW if head == INDIRECT else WIDE


def num_peaks(head: str) -> int:
    """Return how many windows of a text a head may doubt: what is planted is easily missed."""
    return 3 if head == INDIRECT else 1


@dataclass(frozen=True, slots=True)
class Peak:
    """A window of a text and what a head says of it.

    Args:
        logit: less the margin.
        begin: where it begins.
        end: where it ends.
        margin: what is taken off whatever a stage says of it.
    """

    logit: float
    begin: int
    end: int
    margin: float = 0.0


class LinearHeads:
    """All linear heads.

    Args:
        weights: one row a bucket, one column a head.
        biases: one a head.
        names: of the heads, in the columns' order.
    """

    def __init__(
        self, weights: NDArray[np.float32], biases: NDArray[np.float32], names: Sequence[str]
    ) -> None:
        # One row a head: what a text needs of it then lies in few pages.
        self._weights = np.ascontiguousarray(weights.T, np.float32)
        self._biases, self._names = biases, tuple(names)

    def peaks(self, reading: Reading, wanted: frozenset[str]) -> dict[str, list[Peak]]:
        """Return each wanted head's highest windows, `num_peaks` of them, none over another.

        Of a head for requests then the highest sentence, if the text has several.
        """
        found = features(reading.text)
        buckets = found.buckets.astype(np.intp)
        columns = {name: column for column, name in enumerate(self._names) if name in wanted}
        peaks: dict[str, list[Peak]] = {}
        for cut in {cut_of(name) for name in columns}:
            names = [name for name in columns if cut_of(name) == cut]
            # The last column stays zero, see `_Grid`.
            gained = np.zeros((len(names), len(buckets) + 1), np.float32)
            for row, name in zip(gained, names, strict=True):
                self._weights[columns[name]].take(buckets, out=row[:-1], mode="clip")
            biases = [float(self._biases[columns[name]]) for name in names]
            counts = [num_peaks(name) for name in names]
            grid = _Grid(found, reading.windows(cut))
            peaks.update(zip(names, grid.peaks(gained, biases, counts), strict=True))
            rows = [idx for idx, name in enumerate(names) if name in SENTENCE_HEADS]
            if rows and (sentences := reading.sentences(cut)):
                biases = [biases[idx] for idx in rows]
                grid = _Grid(found, sentences)
                for idx, (one,) in zip(
                    rows, grid.peaks(gained[rows], biases, [1] * len(rows)), strict=True
                ):
                    logit = one.logit - SENTENCE_MARGIN
                    peaks[names[idx]].append(Peak(logit, one.begin, one.end, SENTENCE_MARGIN))
        return {name: peaks[name] for name in columns}


class _Grid:
    """Where the windows of a text begin and end, and which features lie between two such places.

    Features are summed between neighbouring places once; windows, which overlap, add these up.
    """

    def __init__(self, found: Features, spans: Sequence[tuple[int, int]]) -> None:
        windows = np.array(spans, np.int32)
        self._begins, self._ends = windows[:, 0], windows[:, 1]
        places = np.unique(windows)
        self._first, self._last = places.searchsorted(self._begins), places.searchsorted(self._ends)
        groups = pairwise((0, *found.groups))
        # One row a group: the index of the first feature at or behind each place.
        at = np.array(
            [start + found.positions[start:end].searchsorted(places) for start, end in groups]
        )
        self._at, self._is_empty = at[:, :-1].ravel(), at[:, :-1] == at[:, 1:]
        counts = at.sum(axis=0)
        num_features = counts[self._last] - counts[self._first]
        self._sizes = np.sqrt(np.maximum(num_features, 1.0))

    def peaks(
        self, gained: NDArray[np.float32], biases: Sequence[float], counts: Sequence[int]
    ) -> list[list[Peak]]:
        """Return each head's windows with the highest logits, the highest first.

        Args:
            gained: what each feature gains, one row a head; a zero behind the last one.
            biases: one a head.
            counts: how many windows each head wants.
        """
        logits = self._sums(gained) / self._sizes + np.array(biases)[:, np.newaxis]
        return [self._highest(row, count) for row, count in zip(logits, counts, strict=True)]

    def _highest(self, logits: NDArray[np.float64], count: int) -> list[Peak]:
        found: list[Peak] = []
        order = (
            [int(logits.argmax())] if count == 1 else np.argsort(-logits, kind="stable").tolist()
        )
        for idx in order:
            begin, end = int(self._begins[idx]), int(self._ends[idx])
            if all(end <= one.begin or begin >= one.end for one in found):
                found.append(Peak(float(logits[idx]), begin, end))
                if len(found) == count:
                    break
        return found

    def _sums(self, gained: NDArray[np.float32]) -> NDArray[np.float64]:
        if not len(self._at):
            return np.zeros((len(gained), len(self._begins)))
        # `reduceat` wants indices inside, and gives one feature where there is none.
        parts = np.add.reduceat(gained, self._at, axis=1, dtype=np.float64)
        parts = parts.reshape(len(gained), *self._is_empty.shape)
        parts[:, self._is_empty] = 0.0
        sums = np.zeros((len(gained), self._is_empty.shape[1] + 1))
        np.cumsum(parts.sum(axis=1), axis=1, out=sums[:, 1:])
        return sums[:, self._last] - sums[:, self._first]


def within(found: Features, begin: int, end: int) -> NDArray[np.int32]:
    """Return the buckets of the features that begin in a window, as `LinearHeads` counts them."""
    inside = (found.positions >= begin) & (found.positions < end)
    return found.buckets[inside]
