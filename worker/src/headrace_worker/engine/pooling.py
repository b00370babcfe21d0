"""Embeddings: one vector of unit length out of a text's hidden states, which come in chunks."""

from __future__ import annotations

import enum

import torch


class Pooling(enum.Enum):
    """Which hidden states make the vector: of all tokens, or of the last one."""

    MEAN = "mean"
    LAST = "last"

    def num_wanted(self, num_tokens: int, *, is_last_chunk: bool) -> int:
        """How many of a chunk's last tokens are needed."""
        if self is Pooling.MEAN:
            return num_tokens
        return int(is_last_chunk)


class Pooler:
    """Takes the hidden states of one text, chunk after chunk. Engine's thread only."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None

    def add(self, hidden: torch.Tensor, *, is_first: bool) -> None:
        """Take in the (T, E) wanted states of a chunk; T may be 0.

        A first chunk starts anew: a text that was preempted is computed again from its beginning.
        """
        if is_first:
            self._sum = None
        if len(hidden):
            total = hidden.sum(dim=0)
            self._sum = total if self._sum is None else self._sum + total

    def vector(self) -> list[float]:
        """Return the embedding; the length takes care of how many states were added."""
        if self._sum is None:
            raise ValueError("no hidden state was added")
        unit: list[float] = torch.nn.functional.normalize(self._sum, dim=0).tolist()
        return unit
