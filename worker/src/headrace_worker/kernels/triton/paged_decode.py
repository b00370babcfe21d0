"""Attention of single tokens over paged KV, the context split over programs (Flash-Decoding).

Each program reads one part of one row's keys and values for one KV head and serves all query heads
that share it, keeping a running maximum (arXiv 2205.14135); a second kernel joins the parts by
their log-sums. Traffic: 2 K D values per position, once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headrace_worker.kernels.plan import Scoring
from headrace_worker.kernels.triton.launch import MIN_DOT, check_last_contiguous, padded, precision
from headrace_worker.kernels.triton.tuning import UNTUNED, Tuning

# A part shorter than this costs more to join than it saves.
_MIN_SPLIT_TOKENS = 256
_PROGRAMS_PER_PROCESSOR = 4
_NEVER = tl.constexpr(-1.0e30)


@dataclass(frozen=True)
class DecodeRows:
    """Rows of one token each.

    Attributes:
        token_idx: (B,) int32, place of each row's token in the flat batch.
        contexts: (B,) int32, positions that each row has, its token included.
        tables: (B, M) int32, block tables; entries behind a row's last block are not read.
        max_context: no context is longer. The number of splits follows from it, so a recorded
            launch serves all contexts up to it.
    """

    token_idx: torch.Tensor
    contexts: torch.Tensor
    tables: torch.Tensor
    max_context: int


@triton.jit
def paged_decode_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    token_idx_ptr,
    contexts_ptr,
    tables_ptr,
    parts_ptr,
    log_sums_ptr,
    scale,
    soft_cap,
    window,
    num_splits,
    stride_q,
    stride_table,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per row, KV head and split; writes a part of the result and its log-sum."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    shared: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    context = tl.load(contexts_ptr + row)
    token = tl.load(token_idx_ptr + row).to(tl.int64)
    first = tl.where(window > 0, tl.maximum(context - window, 0), 0)
    share = tl.cdiv(tl.cdiv(context - first, num_splits), TILE) * TILE
    begin = first + split * share
    end = tl.minimum(begin + share, context)
    head = tl.arange(0, GROUP)
    dim = tl.arange(0, DIM_PADDED)
    is_head = head < shared
    is_dim = dim < DIM
    q_at = token * stride_q + (kv_head * shared + head)[:, None] * DIM + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=is_head[:, None] & is_dim[None, :], other=0.0)
    top = tl.full((GROUP,), _NEVER, tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    acc = tl.zeros((GROUP, DIM_PADDED), tl.float32)
    for start in range(begin, end, TILE):
        pos = start + tl.arange(0, TILE)
        seen = pos < end
        block = tl.load(tables_ptr + row * stride_table + pos // BLOCK_SIZE, mask=seen, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + pos % BLOCK_SIZE
        at = (slot * NUM_KV_HEADS + kv_head)[:, None] * DIM + dim[None, :]
        is_read = seen[:, None] & is_dim[None, :]
        k = tl.load(keys_ptr + at, mask=is_read, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_CAP:
            scores = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / soft_cap) + 1.0))
        scores = tl.where(seen[None, :], scores, _NEVER)
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        fade = tl.exp(top - new_top)
        weights = tl.exp(scores - new_top[:, None])
        v = tl.load(values_ptr + at, mask=is_read, other=0.0)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        total = total * fade + tl.sum(weights, axis=1)
        top = new_top
    # A split behind the context's end adds nothing.
    is_empty = total <= 0.0
    divisor = tl.where(is_empty, 1.0, total)
    out = (row * NUM_HEADS + kv_head * shared + head) * num_splits + split
    part_at = out[:, None].to(tl.int64) * DIM + dim[None, :]
    is_written = is_head[:, None] & is_dim[None, :]
    tl.store(parts_ptr + part_at, acc / divisor[:, None], mask=is_written)
    log_sum = tl.where(is_empty, _NEVER, top + tl.log(divisor))
    tl.store(log_sums_ptr + out, log_sum, mask=is_head)


@triton.jit
def join_splits_kernel(
    parts_ptr,
    log_sums_ptr,
    token_idx_ptr,
    out_ptr,
    num_splits,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program per row and head."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, DIM_PADDED)
    is_split = split < num_splits
    is_dim = dim < DIM
    at = (row * NUM_HEADS + head) * num_splits + split
    log_sums = tl.load(log_sums_ptr + at, mask=is_split, other=_NEVER)
    weights = tl.exp(log_sums - tl.max(log_sums, axis=0))
    weights = weights / tl.sum(weights, axis=0)
    is_read = is_split[:, None] & is_dim[None, :]
    part_at = at[:, None].to(tl.int64) * DIM + dim[None, :]
    parts = tl.load(parts_ptr + part_at, mask=is_read, other=0.0)
    joined = tl.sum(parts * weights[:, None], axis=0)
    token = tl.load(token_idx_ptr + row).to(tl.int64)
    target = out_ptr + (token * NUM_HEADS + head) * DIM + dim
    tl.store(target, joined.to(target.dtype.element_ty), mask=is_dim)


def paged_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    rows: DecodeRows,
    scoring: Scoring,
    out: torch.Tensor,
    tuning: Tuning = UNTUNED,
) -> None:
    """Compute *rows* of *q* into *out*; see `reference.paged_attention` for both."""
    check_last_contiguous(q, kv, rows.tables)
    num_rows, (_, num_heads, dim) = len(rows.contexts), q.shape
    block_size, num_kv_heads = kv.shape[2:4]
    splits = num_splits(num_rows * num_kv_heads, rows.max_context, q.device)
    parts = torch.empty((num_rows, num_heads, splits, dim), dtype=torch.float32, device=q.device)
    log_sums = torch.empty((num_rows, num_heads, splits), dtype=torch.float32, device=q.device)
    sizes = {"NUM_HEADS": num_heads, "DIM": dim, "DIM_PADDED": padded(dim, MIN_DOT)}
    paged_decode_kernel[(num_rows, num_kv_heads, splits)](
        q, kv[0], kv[1], rows.token_idx, rows.contexts, rows.tables, parts, log_sums,
        scoring.scale, scoring.soft_cap, scoring.window_tokens, splits, q.stride(0),
        rows.tables.stride(0), **sizes, NUM_KV_HEADS=num_kv_heads,
        GROUP=padded(num_heads // num_kv_heads, MIN_DOT), BLOCK_SIZE=block_size,
        HAS_CAP=scoring.soft_cap > 0, PRECISION=precision(q.dtype),
        **tuning.cut("paged_decode", dim, q.dtype),
    )  # fmt: skip
    join_splits_kernel[(num_rows, num_heads)](
        parts, log_sums, rows.token_idx, out, splits, **sizes, SPLITS=padded(splits)
    )


def num_splits(num_programs: int, max_context: int, device: torch.device) -> int:
    """Into how many parts contexts are cut, so that all processors have work."""
    processors = 1
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = triton.cdiv(_PROGRAMS_PER_PROCESSOR * processors, num_programs)
    return max(1, min(wanted, triton.cdiv(max_context, _MIN_SPLIT_TOKENS)))
