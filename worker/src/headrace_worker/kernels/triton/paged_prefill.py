"""Causal attention of chunks of several tokens over paged KV, of all rows of a batch in one launch.

Tiles of queries of one head run over the keys they see, with a running maximum (arXiv 2205.14135,
2307.08691); rows of any length share the launch: the host lists which tile belongs to which row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headrace_worker.kernels.plan import Scoring
from headrace_worker.kernels.triton.launch import MIN_DOT, check_last_contiguous, padded, precision

# Queries in a tile; the host cuts rows by it.
TILE_QUERIES = 64
_TILE_KEYS = 64
_NEVER = tl.constexpr(-1.0e30)


@dataclass(frozen=True)
class PrefillRows:
    """Rows of several tokens, cut into tiles of `TILE_QUERIES`.

    Attributes:
        tile_row: (tiles,) int32, each tile's row.
        tile_start: (tiles,) int32, the first query of each tile, counted in its row.
        starts: (R,) int32, each row's first token in the flat batch.
        num_new: (R,) int32, tokens of each row in this step.
        contexts: (R,) int32, positions of each row once they are in.
        tables: (R, M) int32, block tables.
    """

    tile_row: torch.Tensor
    tile_start: torch.Tensor
    starts: torch.Tensor
    num_new: torch.Tensor
    contexts: torch.Tensor
    tables: torch.Tensor


@triton.jit
def paged_prefill_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    out_ptr,
    tile_row_ptr,
    tile_start_ptr,
    starts_ptr,
    num_new_ptr,
    contexts_ptr,
    tables_ptr,
    scale,
    soft_cap,
    window,
    stride_q,
    stride_out,
    stride_table,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per tile of queries and query head."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    row = tl.load(tile_row_ptr + tile)
    begin = tl.load(tile_start_ptr + tile)
    num_new = tl.load(num_new_ptr + row)
    context = tl.load(contexts_ptr + row)
    query = begin + tl.arange(0, TILE_M)
    is_query = query < num_new
    position = context - num_new + query
    dim = tl.arange(0, DIM_PADDED)
    is_dim = dim < DIM
    token = (tl.load(starts_ptr + row) + query).to(tl.int64)
    is_row = is_query[:, None] & is_dim[None, :]
    q_at = token[:, None] * stride_q + head * DIM + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=is_row, other=0.0)
    top = tl.full((TILE_M,), _NEVER, tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    acc = tl.zeros((TILE_M, DIM_PADDED), tl.float32)
    last = tl.minimum(context - num_new + begin + TILE_M, context)
    first_seen = tl.where(window > 0, tl.maximum(context - num_new + begin - window + 1, 0), 0)
    for start in range(first_seen // TILE_N * TILE_N, last, TILE_N):
        pos = start + tl.arange(0, TILE_N)
        is_key = pos < last
        block = tl.load(tables_ptr + row * stride_table + pos // BLOCK_SIZE, mask=is_key, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + pos % BLOCK_SIZE
        at = (slot * NUM_KV_HEADS + kv_head)[:, None] * DIM + dim[None, :]
        is_read = is_key[:, None] & is_dim[None, :]
        k = tl.load(keys_ptr + at, mask=is_read, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_CAP:
            scores = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / soft_cap) + 1.0))
        seen = pos[None, :] <= position[:, None]
        seen = seen & ((window <= 0) | (pos[None, :] > position[:, None] - window))
        scores = tl.where(seen, scores, _NEVER)
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        fade = tl.exp(top - new_top)
        # Where nothing has been seen yet all scores equal the maximum; they still weigh nothing.
        weights = tl.where(seen, tl.exp(scores - new_top[:, None]), 0.0)
        v = tl.load(values_ptr + at, mask=is_read, other=0.0)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        total = total * fade + tl.sum(weights, axis=1)
        top = new_top
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    out_at = token[:, None] * stride_out + head * DIM + dim[None, :]
    tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=is_row)


def paged_prefill(
    q: torch.Tensor, kv: torch.Tensor, rows: PrefillRows, scoring: Scoring, out: torch.Tensor
) -> None:
    """Compute *rows* of *q* into *out*; see `reference.paged_attention` for both."""
    check_last_contiguous(q, kv, rows.tables, out)
    _, num_heads, dim = q.shape
    block_size, num_kv_heads = kv.shape[2:4]
    paged_prefill_kernel[(len(rows.tile_row), num_heads)](
        q, kv[0], kv[1], out, rows.tile_row, rows.tile_start, rows.starts, rows.num_new,
        rows.contexts, rows.tables, scoring.scale, scoring.soft_cap, scoring.window_tokens,
        q.stride(0), out.stride(0), rows.tables.stride(0), NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads, DIM=dim, DIM_PADDED=padded(dim, MIN_DOT),
        BLOCK_SIZE=block_size, TILE_M=TILE_QUERIES, TILE_N=_TILE_KEYS,
        HAS_CAP=scoring.soft_cap > 0, PRECISION=precision(q.dtype), num_warps=4, num_stages=3,
    )  # fmt: skip
