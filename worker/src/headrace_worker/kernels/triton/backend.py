"""The Triton kernels as one backend; see `kernels.dispatch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from headrace_worker.kernels.plan import PlacedRow, Scoring
from headrace_worker.kernels.triton.copy_blocks import copy_blocks
from headrace_worker.kernels.triton.gated import gelu_mul, silu_mul
from headrace_worker.kernels.triton.paged_decode import DecodeRows, paged_decode
from headrace_worker.kernels.triton.paged_prefill import PrefillRows, paged_prefill
from headrace_worker.kernels.triton.rms_norm import add_rms_norm, rms_norm
from headrace_worker.kernels.triton.rope import rope_write_kv
from headrace_worker.kernels.triton.sampler import sample
from headrace_worker.kernels.triton.tuning import UNTUNED, Tuning

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


def kernels(make: Callable[..., _Set], tuning: Tuning) -> _Set:
    """Return the operations, cut as *tuning* says, as *make* takes them by name."""
    return make(
        rms_norm=partial(rms_norm, tuning=tuning),
        add_rms_norm=partial(add_rms_norm, tuning=tuning),
        silu_mul=partial(silu_mul, tuning=tuning),
        gelu_mul=partial(gelu_mul, tuning=tuning),
        rope_write_kv=partial(rope_write_kv, tuning=tuning),
        paged_attention=partial(paged_attention, tuning=tuning),
        copy_blocks=partial(copy_blocks, tuning=tuning),
        make_plan=make_plan,
        sample=sample,
        decode_plan=decode_plan,
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


def decode_plan(
    slots: torch.Tensor, contexts: torch.Tensor, tables: torch.Tensor, max_context: int
) -> TritonPlan:
    """Plan one token for each of B rows from tensors that may be filled anew for each step.

    Args:
        slots: (B,) slot of each token.
        contexts: (B,) int32, positions of each row, its token included; at least one.
        tables: (B, M) int32, block tables.
        max_context: no context is ever longer.
    """
    token_idx = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
    return TritonPlan(slots, DecodeRows(token_idx, contexts, tables, max_context), None)


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    plan: TritonPlan,
    scoring: Scoring,
    tuning: Tuning = UNTUNED,
) -> torch.Tensor:
    """See `reference.paged_attention`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if plan.decode is not None:
        paged_decode(q, kv, plan.decode, scoring, out, tuning)
    if plan.prefill is not None:
        paged_prefill(q, kv, plan.prefill, scoring, out, tuning)
    return out


def _decode_rows(rows: Sequence[PlacedRow], device: torch.device) -> DecodeRows:
    return DecodeRows(
        token_idx=_ints([row.start for row in rows], device),
        contexts=_ints([row.context_tokens for row in rows], device),
        tables=_tables(rows, device),
        max_context=max(row.context_tokens for row in rows),
    )


def _prefill_rows(rows: Sequence[PlacedRow], device: torch.device) -> PrefillRows:
    return PrefillRows(
        starts=_ints([row.start for row in rows], device),
        num_new=_ints([row.num_new for row in rows], device),
        contexts=_ints([row.context_tokens for row in rows], device),
        tables=_tables(rows, device),
        sizes=[(row.num_new, row.context_tokens - row.num_new) for row in rows],
    )


def _tables(rows: Sequence[PlacedRow], device: torch.device) -> torch.Tensor:
    tables = np.zeros((len(rows), max(len(row.table) for row in rows)), dtype=np.int32)
    for idx, row in enumerate(rows):
        tables[idx, : len(row.table)] = row.table
    return torch.from_numpy(tables).to(device)


def _ints(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
