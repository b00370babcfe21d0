"""The dense stage: what the embedding model says of a window, judged by a small network.

An embedding says what a text is about. The states of its tokens, further down in the model, still
say what is said about it, so the network reads both: the embedding, and the mean and the maximum
of the states. One inner layer, all heads at once; numpy alone, a small part of the model's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_guard.classifiers.embedding import NUM_DIMENSIONS, Embedded

Array = NDArray[np.float32]
NUM_INPUTS = 3 * NUM_DIMENSIONS


def inputs_of(embedded: Embedded) -> Array:
    """Return what the network reads of a window, not yet scaled."""
    states = embedded.states
    return np.concatenate([embedded.vector, states.mean(axis=0), states.max(axis=0)])


@dataclass(frozen=True)
class Dense:
    """The network.

    Args:
        names: of the heads, in the columns' order.
        shifts: taken off the inputs.
        scales: what the inputs are then divided by.
        inner: weights of the inner layer, one column a unit.
        inner_biases: one a unit.
        outer: weights of the heads, one column a head.
        outer_biases: one a head.
    """

    names: Sequence[str]
    shifts: Array
    scales: Array
    inner: Array
    inner_biases: Array
    outer: Array
    outer_biases: Array

    def logits(self, embedded: Embedded) -> dict[str, float]:
        """Return each head's logit of a window."""
        return self.judge(inputs_of(embedded))

    def judge(self, inputs: Array) -> dict[str, float]:
        """Return each head's logit of what the network reads, not yet scaled."""
        scaled = (inputs - self.shifts) / self.scales
        found = self.forward(scaled[np.newaxis])[0]
        return dict(zip(self.names, found.tolist(), strict=True))

    def forward(self, scaled: Array) -> Array:
        """Return the logits of scaled inputs, one row a window."""
        units = np.maximum(scaled @ self.inner + self.inner_biases, np.float32(0))
        logits: Array = units @ self.outer + self.outer_biases
        return logits
