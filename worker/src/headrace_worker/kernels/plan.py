"""Who attends to what in one step, as the plain-torch kernels take it.

Python loops here run over rows, never over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

BlockIds = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Scoring:
    """How products of queries and keys become weights.

    Attributes:
        scale: multiplies each product.
        soft_cap: products s become c tanh(s / c) then; 0 = they stay.
        window_tokens: positions that a token sees, itself included; 0 = all.
    """

    scale: float
    soft_cap: float = 0.0
    window_tokens: int = 0


@dataclass(frozen=True)
class DecodeGroup:
    """Rows of one token each, of similar length, computed together.

    Attributes:
        token_idx: (B,) place of each row's token in the flat batch.
        block_ids: (B * M,) block tables padded to M blocks with block 0, row after row.
        bias: (B, 1, 1, M * S) 0 where a row sees a slot, -inf where not.
        contexts: (B,) positions of each row, its token included.
    """

    token_idx: torch.Tensor
    block_ids: torch.Tensor
    bias: torch.Tensor
    contexts: torch.Tensor


@dataclass(frozen=True)
class PrefillRow:
    """A run of several tokens of one row.

    Attributes:
        start: first token in the flat batch.
        end: one past the last.
        context_tokens: tokens of the row once these are in, so its last token sees that many.
        block_ids: (ceil(context_tokens / S),) the row's blocks.
        bias: (end - start, context_tokens) 0 where a token sees a position, -inf where not; None
            where the run is the whole context and so plainly causal.
    """

    start: int
    end: int
    context_tokens: int
    block_ids: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class AttentionPlan:
    """Who attends to what in one step; the same for all layers.

    Attributes:
        slots: (T,) slot that each token's key and value go to.
        decode: groups of one-token rows.
        prefill: rows of several tokens.
    """

    slots: torch.Tensor
    decode: Sequence[DecodeGroup]
    prefill: Sequence[PrefillRow]


@dataclass(frozen=True)
class PlacedRow:
    """A row of a step and its place in the flat batch.

    Attributes:
        start: its first token in the flat batch.
        num_new: its tokens in this step.
        context_tokens: its tokens once these are in.
        table: (ceil(context_tokens / S),) its blocks.
    """

    start: int
    num_new: int
    context_tokens: int
    table: BlockIds


def make_plan(rows: Sequence[PlacedRow], slots: torch.Tensor, block_size: int) -> AttentionPlan:
    """Group a step's rows: those of one token together, the others one by one."""
    return AttentionPlan(
        slots=slots,
        decode=_decode_groups([row for row in rows if row.num_new == 1], block_size),
        prefill=[_prefill_row(row) for row in rows if row.num_new > 1],
    )


def _prefill_row(row: PlacedRow) -> PrefillRow:
    num_new, context_tokens, bias = row.num_new, row.context_tokens, None
    if num_new < context_tokens:
        is_future = torch.arange(context_tokens) > torch.arange(num_new).unsqueeze(1) + (
            context_tokens - num_new
        )
        bias = torch.zeros(is_future.shape).masked_fill_(is_future, float("-inf"))
    table = torch.from_numpy(row.table)
    return PrefillRow(row.start, row.start + num_new, context_tokens, table, bias)


def _decode_groups(rows: Sequence[PlacedRow], block_size: int) -> list[DecodeGroup]:
    """Group one-token rows so that padding at most doubles a row's blocks."""
    by_size: dict[int, list[PlacedRow]] = {}
    for row in rows:
        by_size.setdefault(len(row.table).bit_length(), []).append(row)
    return [_decode_group(group, block_size) for group in by_size.values()]


def _decode_group(rows: Sequence[PlacedRow], block_size: int) -> DecodeGroup:
    width = max(len(row.table) for row in rows)
    tables = np.zeros((len(rows), width), dtype=np.int64)
    for i, row in enumerate(rows):
        tables[i, : len(row.table)] = row.table
    contexts = torch.tensor([row.context_tokens for row in rows])
    is_hidden = torch.arange(width * block_size) >= contexts.unsqueeze(1)
    bias = torch.zeros(is_hidden.shape).masked_fill_(is_hidden, float("-inf"))
    return DecodeGroup(
        token_idx=torch.tensor([row.start for row in rows]),
        block_ids=torch.from_numpy(tables.reshape(-1)),
        bias=bias[:, None, None, :],
        contexts=contexts,
    )
