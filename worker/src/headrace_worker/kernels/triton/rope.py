"""Rotation of queries and keys (arXiv 2104.09864) and the write into the paged KV, in one pass.

Traffic per token: (H + 2K) D values read, as many written; the keys and values go to their slots at
once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace_worker.kernels.triton.launch import check_last_contiguous, padded
from headrace_worker.kernels.triton.tuning import UNTUNED, Tuning


@triton.jit
def _turn(source, target, inside, cos, sin, HALF: tl.constexpr):
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, (low * cos - high * sin).to(target.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (high * cos + low * sin).to(target.dtype.element_ty), mask=inside)


@triton.jit
def rope_write_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    out_ptr,
    keys_ptr,
    values_ptr,
    stride_q,
    stride_k,
    stride_v,
    num_heads,
    num_kv_heads,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One program per token and HEADS heads: of the queries first, then of the keys and values."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    num_q_parts = tl.cdiv(num_heads, HEADS)
    pair = tl.arange(0, BLOCK)[None, :]
    is_pair = pair < HALF
    size = 2 * HALF
    cos = tl.load(cos_ptr + token * HALF + pair, mask=is_pair, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * HALF + pair, mask=is_pair, other=0.0).to(tl.float32)
    if part < num_q_parts:
        head = (part * HEADS + tl.arange(0, HEADS))[:, None]
        inside = (head < num_heads) & is_pair
        target = out_ptr + (token * num_heads + head) * size + pair
        _turn(q_ptr + token * stride_q + head * size + pair, target, inside, cos, sin, HALF)
    else:
        head = ((part - num_q_parts) * HEADS + tl.arange(0, HEADS))[:, None]
        inside = (head < num_kv_heads) & is_pair
        slot = tl.load(slots_ptr + token).to(tl.int64)
        at = (slot * num_kv_heads + head) * size + pair
        source = k_ptr + token * stride_k + head * size + pair
        _turn(source, keys_ptr + at, inside, cos, sin, HALF)
        source = v_ptr + token * stride_v + head * size + pair
        low = tl.load(source, mask=inside, other=0.0)
        high = tl.load(source + HALF, mask=inside, other=0.0)
        tl.store(values_ptr + at, low, mask=inside)
        tl.store(values_ptr + at + HALF, high, mask=inside)


def rope_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    kv: torch.Tensor,
    slots: torch.Tensor,
    tuning: Tuning = UNTUNED,
) -> torch.Tensor:
    """See `reference.rope_write_kv`."""
    check_last_contiguous(q, k, v, *rope, kv)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    cut = tuning.cut("rope_write_kv", head_dim, q.dtype)
    parts = triton.cdiv(num_heads, cut["HEADS"]) + triton.cdiv(num_kv_heads, cut["HEADS"])
    rope_write_kv_kernel[(num_tokens, parts)](
        q, k, v, *rope, slots, out, kv[0], kv[1], q.stride(0), k.stride(0), v.stride(0),
        num_heads, num_kv_heads, HALF=head_dim // 2, BLOCK=padded(head_dim // 2), **cut,
    )  # fmt: skip
    return out
