"""The Triton kernels as one backend; see `kernels.dispatch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from headrace_worker.kernels.plan import PlacedRow, Scoring
from headrace_worker.kernels.triton.copy_blocks import copy_blocks
from headrace_worker.kernels.triton.gated import gelu_mul, silu_mul
from headrace_worker.kernels.triton.paged_decode import DecodeRows, paged_decode
from headrace_worker.kernels.triton.paged_prefill import TILE_QUERIES, PrefillRows, paged_prefill
from headrace_worker.kernels.triton.rms_norm import add_rms_norm, rms_norm
from headrace_worker.kernels.triton.rope import rope_write_kv

_Set = TypeVar("_Set")


@dataclass(frozen=True)
class TritonPlan:
    """Who attends to what in one step.

    Attributes:
        slots: (T,) slot that each token's key and value go to.
        decode: rows of one token; None = there are none.
        prefill: rows of several tokens; None = there are none.
    """

    slots: torch.Tensor
    decode: DecodeRows | None
    prefill: PrefillRows | None


def kernels(make: Callable[..., _Set]) -> _Set:
    """Return the operations as *make* takes them by name."""
    return make(
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        silu_mul=silu_mul,
        gelu_mul=gelu_mul,
        rope_write_kv=rope_write_kv,
        paged_attention=paged_attention,
        copy_blocks=copy_blocks,
        make_plan=make_plan,
    )


def make_plan(rows: Sequence[PlacedRow], slots: torch.Tensor, block_size: int) -> TritonPlan:
    """Describe a step's rows on the device of *slots*."""
    del block_size  # the pool says it
    decode = [row for row in rows if row.num_new == 1]
    prefill = [row for row in rows if row.num_new > 1]
    return TritonPlan(
        slots=slots,
        decode=_decode_rows(decode, slots.device) if decode else None,
        prefill=_prefill_rows(prefill, slots.device) if prefill else None,
    )


def paged_attention(
    q: torch.Tensor, kv: torch.Tensor, plan: TritonPlan, scoring: Scoring
) -> torch.Tensor:
    """See `reference.paged_attention`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if plan.decode is not None:
        paged_decode(q, kv, plan.decode, scoring, out)
    if plan.prefill is not None:
        paged_prefill(q, kv, plan.prefill, scoring, out)
    return out


def _decode_rows(rows: Sequence[PlacedRow], device: torch.device) -> DecodeRows:
    return DecodeRows(
        token_idx=_ints([row.start for row in rows], device),
        contexts=_ints([row.context_tokens for row in rows], device),
        tables=_tables(rows, device),
        max_context=max(row.context_tokens for row in rows),
    )


def _prefill_rows(rows: Sequence[PlacedRow], device: torch.device) -> PrefillRows:
    # Tiles of late queries see most; launched first, they do not end last.
    tiles = sorted(
        ((idx, start) for idx, row in enumerate(rows) for start in _tile_starts(row)),
        key=lambda tile: -(rows[tile[0]].context_tokens - rows[tile[0]].num_new + tile[1]),
    )
    return PrefillRows(
        tile_row=_ints([idx for idx, _ in tiles], device),
        tile_start=_ints([start for _, start in tiles], device),
        starts=_ints([row.start for row in rows], device),
        num_new=_ints([row.num_new for row in rows], device),
        contexts=_ints([row.context_tokens for row in rows], device),
        tables=_tables(rows, device),
    )


def _tile_starts(row: PlacedRow) -> range:
    return range(0, row.num_new, TILE_QUERIES)


def _tables(rows: Sequence[PlacedRow], device: torch.device) -> torch.Tensor:
    tables = np.zeros((len(rows), max(len(row.table) for row in rows)), dtype=np.int32)
    for idx, row in enumerate(rows):
        tables[idx, : len(row.table)] = row.table
    return torch.from_numpy(tables).to(device)


def _ints(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
