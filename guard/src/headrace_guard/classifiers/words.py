"""The words stage: what the words of a window mean, whatever their order; well below a millisecond.

Linear heads know only words that they were taught. A vector for each of the embedding model's word
pieces, made once by asking that model about each piece alone (as "model2vec" does, Tulkens and van
Dongen 2024), tells which other words are near. A window is the mean, the highest and the lowest of
its words' vectors and of the sums of neighbours; a small network judges these, all heads at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_guard.classifiers.dense import Array, Dense

NUM_POOLS = 5


@dataclass(frozen=True)
class Words:
    """Vectors and the network that judges them.

    Args:
        vectors: one row a word piece, as signed bytes.
        scale: what these are multiplied with.
        net: reads `pooled`.
    """

    vectors: NDArray[np.int8]
    scale: float
    net: Dense

    def logits(self, ids: Sequence[int]) -> Mapping[str, float]:
        """Return each head's logit of a window.

        Args:
            ids: of its word pieces.
        """
        return self.all_logits([ids])[0]

    def all_logits(self, windows: Sequence[Sequence[int]]) -> list[dict[str, float]]:
        """Return the same of several windows; the network's weights are read once for all."""
        inputs = np.array([pooled(self.vectors, self.scale, ids) for ids in windows])
        found = self.net.forward((inputs - self.net.shifts) / self.net.scales)
        return [dict(zip(self.net.names, row, strict=True)) for row in found.tolist()]


def pooled(vectors: NDArray[np.int8], scale: float, ids: Sequence[int]) -> Array:
    """Return what the network reads of a window, not yet scaled; zeros for one without words."""
    size = vectors.shape[1]
    if not len(ids):
        return np.zeros(NUM_POOLS * size, np.float32)
    found = vectors[np.asarray(ids, np.intp)]
    wide = found.astype(np.int16)
    sums = wide[:-1] + wide[1:] if len(wide) > 1 else wide
    pools = np.empty((NUM_POOLS, size), np.float32)
    pools[0] = wide.mean(axis=0, dtype=np.float32)
    pools[1], pools[2] = found.max(axis=0), found.min(axis=0)
    pools[3], pools[4] = sums.max(axis=0), sums.min(axis=0)
    return pools.ravel() * np.float32(scale)
