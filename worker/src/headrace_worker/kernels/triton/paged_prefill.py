"""Causal attention of chunks of several tokens over paged KV, of all rows of a batch in one launch.

Tiles of queries of one head run over the keys they see, with a running maximum (arXiv 2205.14135,
2307.08691); rows of any length share the launch: the host lists which tile belongs to which row.
Keys that all of a tile see are weighed without masks, those on the edges with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from headrace_worker.kernels.plan import Scoring
from headrace_worker.kernels.triton.launch import MIN_DOT, check_last_contiguous, padded, precision
from headrace_worker.kernels.triton.tuning import UNTUNED, Tuning

_NEVER = tl.constexpr(-1.0e30)
_LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class PrefillRows:
    """Rows of several tokens.

    Attributes:
        starts: (R,) int32, each row's first token in the flat batch.
        num_new: (R,) int32, tokens of each row in this step.
        contexts: (R,) int32, positions of each row once they are in.
        tables: (R, M) int32, block tables.
        sizes: tokens of each row in this step and positions before them, on the host.
    """

    starts: torch.Tensor
    num_new: torch.Tensor
    contexts: torch.Tensor
    tables: torch.Tensor
    sizes: Sequence[tuple[int, int]]
    _tiles: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def tiles(self, tile_queries: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut the rows; made once a step, as all layers share it.

        Returns:
            (tiles,) int32 each: the tile's row, and its first query, counted in its row.
        """
        if tile_queries not in self._tiles:
            # Tiles of late queries see most; launched first, they do not end last.
            tiles = sorted(
                (-(before + start), idx, start)
                for idx, (num_new, before) in enumerate(self.sizes)
                for start in range(0, num_new, tile_queries)
            )
            cut = torch.tensor([tile[1:] for tile in tiles], dtype=torch.int32).t().contiguous()
            row, start = cut.to(self.starts.device)
            self._tiles[tile_queries] = row, start
        return self._tiles[tile_queries]


@triton.jit
def _weigh(
    acc,
    total,
    top,
    q,
    keys_ptr,
    values_ptr,
    table_ptr,
    first,
    last,
    end,
    position,
    scale,
    soft_cap,
    window,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_N: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Fold the keys of tiles from *first* up to *last* into acc, total and top."""
    dim = tl.arange(0, DIM_PADDED)[None, :]
    for start in range(first, last, TILE_N):
        pos = start + tl.arange(0, TILE_N)
        is_key = pos < end
        block = tl.load(table_ptr + pos // BLOCK_SIZE, mask=is_key, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + pos % BLOCK_SIZE
        at = (slot * NUM_KV_HEADS + kv_head)[:, None] * DIM + dim
        is_read = is_key[:, None] & (dim < DIM)
        k = tl.load(keys_ptr + at, mask=is_read, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_CAP:
            scores = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / soft_cap) + 1.0)) * _LOG2_E
        if IS_MASKED:
            seen = pos[None, :] <= position[:, None]
            seen = seen & ((window <= 0) | (pos[None, :] > position[:, None] - window))
            scores = tl.where(seen, scores, _NEVER)
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        fade = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        if IS_MASKED:
            # Where nothing has been seen yet all scores equal the maximum; they weigh nothing.
            weights = tl.where(seen, weights, 0.0)
        v = tl.load(values_ptr + at, mask=is_read, other=0.0)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        total = total * fade + tl.sum(weights, axis=1)
        top = new_top
    return acc, total, top


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
    HAS_WINDOW: tl.constexpr,
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
    position = context - num_new + query
    dim = tl.arange(0, DIM_PADDED)
    token = (tl.load(starts_ptr + row) + query).to(tl.int64)
    is_row = (query < num_new)[:, None] & (dim < DIM)[None, :]
    q_at = token[:, None] * stride_q + head * DIM + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=is_row, other=0.0)
    top = tl.full((TILE_M,), _NEVER, tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    acc = tl.zeros((TILE_M, DIM_PADDED), tl.float32)
    # Powers of two are what the device computes; a cap has to know the plain scores.
    if not HAS_CAP:
        scale = scale * _LOG2_E
    first_position = context - num_new + begin
    end = tl.minimum(first_position + TILE_M, context)
    # Keys before *whole* are hidden from some query by the window, those from *edge* on by order.
    whole = 0
    edge = (first_position + 1) // TILE_N * TILE_N
    table_ptr = tables_ptr + row * stride_table
    if HAS_WINDOW:
        start = tl.maximum(first_position - window + 1, 0) // TILE_N * TILE_N
        whole = tl.cdiv(tl.maximum(end - window, 0), TILE_N) * TILE_N
        edge = tl.maximum(edge, whole)
        acc, total, top = _weigh(
            acc, total, top, q, keys_ptr, values_ptr, table_ptr, start, tl.minimum(whole, end),
            end, position, scale, soft_cap, window, kv_head, NUM_KV_HEADS, DIM, DIM_PADDED,
            BLOCK_SIZE, TILE_N, HAS_CAP, True, PRECISION,
        )  # fmt: skip
    acc, total, top = _weigh(
        acc, total, top, q, keys_ptr, values_ptr, table_ptr, whole, edge, end, position, scale,
        soft_cap, window, kv_head, NUM_KV_HEADS, DIM, DIM_PADDED, BLOCK_SIZE, TILE_N, HAS_CAP,
        False, PRECISION,
    )  # fmt: skip
    acc, total, top = _weigh(
        acc, total, top, q, keys_ptr, values_ptr, table_ptr, edge, end, end, position, scale,
        soft_cap, window, kv_head, NUM_KV_HEADS, DIM, DIM_PADDED, BLOCK_SIZE, TILE_N, HAS_CAP,
        True, PRECISION,
    )  # fmt: skip
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    out_at = token[:, None] * stride_out + head * DIM + dim[None, :]
    tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=is_row)


def paged_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    rows: PrefillRows,
    scoring: Scoring,
    out: torch.Tensor,
    tuning: Tuning = UNTUNED,
) -> None:
    """Compute *rows* of *q* into *out*; see `reference.paged_attention` for both."""
    check_last_contiguous(q, kv, rows.tables, out)
    _, num_heads, dim = q.shape
    block_size, num_kv_heads = kv.shape[2:4]
    cut = tuning.cut("paged_prefill", dim, q.dtype)
    tile_row, tile_start = rows.tiles(cut["TILE_M"])
    paged_prefill_kernel[(len(tile_row), num_heads)](
        q, kv[0], kv[1], out, tile_row, tile_start, rows.starts, rows.num_new, rows.contexts,
        rows.tables, scoring.scale, scoring.soft_cap, scoring.window_tokens, q.stride(0),
        out.stride(0), rows.tables.stride(0), NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads,
        DIM=dim, DIM_PADDED=padded(dim, MIN_DOT), BLOCK_SIZE=block_size,
        HAS_CAP=scoring.soft_cap > 0, HAS_WINDOW=scoring.window_tokens > 0,
        PRECISION=precision(q.dtype), **cut,
    )  # fmt: skip
