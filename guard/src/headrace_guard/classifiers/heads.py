"""Linear heads over hashed n-grams: a logit for every window of a text, all heads in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_guard.classifiers.cuts import NARROW, WIDE, Cut, spans
from headrace_guard.classifiers.ngrams import Features, features

INJECTION, INDIRECT, HARM, TOXICITY = "injection", "indirect", "harm", "toxicity"
HEADS = (INJECTION, INDIRECT, HARM, TOXICITY)


def cut_of(head: str) -> Cut:
    """Return how a head cuts texts."""
    return NARROW if head == INDIRECT else WIDE


@dataclass(frozen=True, slots=True)
class Peak:
    """The window of a text that a head scores highest."""

    logit: float
    begin: int
    end: int


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
        self._weights = np.ascontiguousarray(weights, np.float32)
        self._biases, self._names = biases, tuple(names)

    def peaks(self, text: str, wanted: frozenset[str]) -> dict[str, Peak]:
        """Return each wanted head's highest window."""
        found = features(text)
        sums = np.zeros((len(self._names), found.num_chars + 1))
        counts = np.zeros(found.num_chars + 1)
        if len(found.buckets):
            gained = self._weights.take(found.buckets, axis=0)
            length = found.num_chars
            for column, name in enumerate(self._names):
                if name in wanted and length:
                    at = np.bincount(found.positions, gained[:, column], length)
                    np.cumsum(at[:length], out=sums[column, 1:])
            if length:
                np.cumsum(np.bincount(found.positions, None, length)[:length], out=counts[1:])
        return {
            name: _peak(sums[column], counts, float(self._biases[column]), cut_of(name))
            for column, name in enumerate(self._names)
            if name in wanted
        }


def _peak(sums: NDArray[np.float64], counts: NDArray[np.float64], bias: float, cut: Cut) -> Peak:
    windows = np.array(spans(len(sums) - 1, cut))
    begins, ends = windows[:, 0], windows[:, 1]
    sizes = np.sqrt(np.maximum(counts[ends] - counts[begins], 1.0))
    logits = (sums[ends] - sums[begins]) / sizes + bias
    best = int(np.argmax(logits))
    return Peak(float(logits[best]), int(begins[best]), int(ends[best]))


def within(found: Features, begin: int, end: int) -> NDArray[np.int32]:
    """Return the buckets of the features that begin in a window, as `LinearHeads` counts them."""
    inside = (found.positions >= begin) & (found.positions < end)
    return found.buckets[inside]
