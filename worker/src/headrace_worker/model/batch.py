"""From rows of a step to the flat tensors a forward pass takes.

Python loops here run over rows, never over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from headrace_worker.kernels.plan import BlockIds, PlacedRow, make_plan


class Plan(Protocol):
    """What a backend needs to know of a step's rows; the same for all layers.

    Attributes:
        slots: (T,) slot that each token's key and value go to.
    """

    @property
    def slots(self) -> torch.Tensor:
        """See above."""
        ...


PlanMaker = Callable[[Sequence[PlacedRow], torch.Tensor, int], Plan]


@dataclass(frozen=True)
class Row:
    """The part of one request that one step computes.

    Attributes:
        token_ids: tokens to compute, at least one: one for a decode, several for a prefill chunk.
        start_pos: position of the first of them = tokens of the row whose KV is already there.
        block_table: the row's blocks in order; they must reach the last token.
        num_logits: how many of the last tokens want logits; 0 for a chunk that is not the last.
    """

    token_ids: Sequence[int]
    start_pos: int
    block_table: Sequence[int]
    num_logits: int


@dataclass(frozen=True)
class Batch:
    """One step's input.

    Attributes:
        token_ids: (T,) all rows' tokens, row after row.
        positions: (T,) position of each in its row.
        plan: what the attention needs.
        logit_idx: places in the flat batch that want logits, in row order.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    plan: Plan
    logit_idx: torch.Tensor


def build_batch(
    rows: Sequence[Row],
    block_size: int,
    plan: PlanMaker = make_plan,
    device: torch.device | None = None,
) -> Batch:
    """Flatten *rows*; see `Row` for what they must fulfil.

    Args:
        rows: at least one.
        block_size: tokens per block.
        plan: makes the backend's plan of rows, slots and block size.
        device: where the tensors shall lie; None = the CPU.
    """
    token_ids: list[int] = []
    positions, slots, logit_idx = [], [], []
    placed: list[PlacedRow] = []
    for row in rows:
        start, num_new = len(token_ids), len(row.token_ids)
        context = row.start_pos + num_new
        table = np.asarray(row.block_table[: -(-context // block_size)], dtype=np.int64)
        pos = np.arange(row.start_pos, context, dtype=np.int64)
        token_ids.extend(row.token_ids)
        positions.append(pos)
        slots.append(table[pos // block_size] * block_size + pos % block_size)
        logit_idx.append(np.arange(start + num_new - row.num_logits, start + num_new))
        placed.append(PlacedRow(start, num_new, context, table))

    def to_device(parts: Sequence[BlockIds]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    return Batch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=to_device(positions),
        plan=plan(placed, to_device(slots), block_size),
        logit_idx=to_device(logit_idx),
    )
