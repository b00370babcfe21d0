"""From rows of a step to the flat tensors a forward pass takes.

Python loops here run over rows, never over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace_worker.kernels.reference import AttentionPlan, DecodeGroup, PrefillRow

_BlockIds = np.ndarray[Any, np.dtype[np.int64]]


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
    plan: AttentionPlan
    logit_idx: torch.Tensor


@dataclass(frozen=True)
class _Placed:
    """A one-token row and its place in the flat batch."""

    token_idx: int
    context_tokens: int
    block_ids: _BlockIds


def build_batch(rows: Sequence[Row], block_size: int) -> Batch:
    """Flatten *rows*; see `Row` for what they must fulfil."""
    token_ids: list[int] = []
    positions, slots, logit_idx = [], [], []
    single: list[_Placed] = []
    prefill: list[PrefillRow] = []
    for row in rows:
        start, num_new = len(token_ids), len(row.token_ids)
        context = row.start_pos + num_new
        table = np.asarray(row.block_table[: -(-context // block_size)], dtype=np.int64)
        pos = np.arange(row.start_pos, context, dtype=np.int64)
        token_ids.extend(row.token_ids)
        positions.append(pos)
        slots.append(table[pos // block_size] * block_size + pos % block_size)
        logit_idx.append(np.arange(start + num_new - row.num_logits, start + num_new))
        if num_new == 1:
            single.append(_Placed(start, context, table))
        else:
            prefill.append(_prefill_row(start, num_new, context, table))
    plan = AttentionPlan(
        slots=torch.from_numpy(np.concatenate(slots)),
        decode=_decode_groups(single, block_size),
        prefill=prefill,
    )
    return Batch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.from_numpy(np.concatenate(positions)),
        plan=plan,
        logit_idx=torch.from_numpy(np.concatenate(logit_idx)),
    )


def _prefill_row(start: int, num_new: int, context_tokens: int, table: _BlockIds) -> PrefillRow:
    bias = None
    if num_new < context_tokens:
        is_future = torch.arange(context_tokens) > torch.arange(num_new).unsqueeze(1) + (
            context_tokens - num_new
        )
        bias = torch.zeros(is_future.shape).masked_fill_(is_future, float("-inf"))
    return PrefillRow(start, start + num_new, context_tokens, torch.from_numpy(table), bias)


def _decode_groups(rows: Sequence[_Placed], block_size: int) -> list[DecodeGroup]:
    """Group one-token rows so that padding at most doubles a row's blocks."""
    by_size: dict[int, list[_Placed]] = {}
    for row in rows:
        by_size.setdefault(len(row.block_ids).bit_length(), []).append(row)
    return [_decode_group(group, block_size) for group in by_size.values()]


def _decode_group(rows: Sequence[_Placed], block_size: int) -> DecodeGroup:
    width = max(len(row.block_ids) for row in rows)
    tables = np.zeros((len(rows), width), dtype=np.int64)
    for i, row in enumerate(rows):
        tables[i, : len(row.block_ids)] = row.block_ids
    contexts = torch.tensor([row.context_tokens for row in rows])
    is_hidden = torch.arange(width * block_size) >= contexts.unsqueeze(1)
    bias = torch.zeros(is_hidden.shape).masked_fill_(is_hidden, float("-inf"))
    return DecodeGroup(
        token_idx=torch.tensor([row.token_idx for row in rows]),
        block_ids=torch.from_numpy(tables.reshape(-1)),
        bias=bias[:, None, None, :],
        contexts=contexts,
    )
