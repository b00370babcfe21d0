"""Rotation of queries and keys (arXiv 2104.09864) and the write into the paged KV, in one pass.

Traffic per token: (H + 2K) D values read, as many written; the keys and values go to their slots at
once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace_worker.kernels.triton.launch import check_last_contiguous, padded


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
):
    """One program per token and head: queries first, then keys, then values."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    size = 2 * HALF
    slot = tl.load(slots_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + token * HALF + pair, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * HALF + pair, mask=inside, other=0.0).to(tl.float32)
    if head < num_heads:
        source = q_ptr + token * stride_q + head * size + pair
        target = out_ptr + (token * num_heads + head) * size + pair
    elif head < num_heads + num_kv_heads:
        kv_head = head - num_heads
        source = k_ptr + token * stride_k + kv_head * size + pair
        target = keys_ptr + (slot * num_kv_heads + kv_head) * size + pair
    else:
        kv_head = head - num_heads - num_kv_heads
        source = v_ptr + token * stride_v + kv_head * size + pair
        target = values_ptr + (slot * num_kv_heads + kv_head) * size + pair
        # Values are not turned.
        cos = tl.full((BLOCK,), 1.0, tl.float32)
        sin = tl.zeros((BLOCK,), tl.float32)
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, (low * cos - high * sin).to(target.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (high * cos + low * sin).to(target.dtype.element_ty), mask=inside)


def rope_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    kv: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """See `reference.rope_write_kv`."""
    check_last_contiguous(q, k, v, *rope, kv)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    rope_write_kv_kernel[(num_tokens, num_heads + 2 * num_kv_heads)](
        q, k, v, *rope, slots, out, kv[0], kv[1], q.stride(0), k.stride(0), v.stride(0),
        num_heads, num_kv_heads, HALF=head_dim // 2, BLOCK=padded(head_dim // 2),
    )  # fmt: skip
    return out
