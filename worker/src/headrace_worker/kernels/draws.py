"""How a token is drawn from a row of logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class Draw(NamedTuple):
    """One draw. Truncations are off at 0, top_p at 1 as well.

    Attributes:
        row: of the logits.
        temperature: above 0.
        top_p: keep the likeliest tokens that together reach this probability.
        min_p: keep tokens at least this likely relative to the likeliest.
        top_k: keep this many likeliest tokens.
        uniform: in [0, 1); picks the first token, by id, whose cumulated probability exceeds it.
    """

    row: int
    temperature: float
    top_p: float
    min_p: float
    top_k: int
    uniform: float


# Draws tokens from (R, V) float32 logits, one for each draw.
Drawer = Callable[[torch.Tensor, Sequence[Draw]], list[int]]
