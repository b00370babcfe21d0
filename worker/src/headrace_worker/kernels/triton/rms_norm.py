"""RMS norm (arXiv 1910.07467), alone or with the addition before it in one pass.

Traffic per row of E values: 2E read and written alone, 4E with the addition (which would cost 5E in
two passes).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace_worker.kernels.triton.launch import check_last_contiguous, padded
from headrace_worker.kernels.triton.tuning import UNTUNED, Tuning


@triton.jit
def rms_norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    eps,
    size,
    heads,
    stride_token,
    stride_head,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row; a row is a head of a token, or a token if there is one head."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < size
    start = (row // heads) * stride_token + (row % heads) * stride_head
    x = tl.load(x_ptr + start + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row * size + cols, mask=inside, other=0.0).to(tl.float32)
        # What is stored is what is normed: rounded once.
        rounded = (x + delta).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * size + cols, rounded, mask=inside)
        x = rounded.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / size + eps)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + row * size + cols, (x * factor * weight).to(out_ptr.dtype.element_ty), inside
    )


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, tuning: Tuning = UNTUNED
) -> torch.Tensor:
    """See `reference.rms_norm`; x: (T, E), or (T, heads, D) as a view of something wider."""
    check_last_contiguous(x, weight)
    size = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rms_norm_kernel[(x.numel() // size,)](
        x, x, weight, out, out, eps, size, heads, x.stride(0), x.stride(1) if heads > 1 else 0,
        HAS_DELTA=False, BLOCK=padded(size), **tuning.cut("rms_norm", size, x.dtype),
    )  # fmt: skip
    return out


def add_rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    tuning: Tuning = UNTUNED,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.add_rms_norm`; x and delta: (T, E), contiguous."""
    check_last_contiguous(x, delta, weight)
    size = x.shape[-1]
    total, out = torch.empty_like(x), torch.empty_like(x)
    rms_norm_kernel[(len(x),)](
        x, delta, weight, out, total, eps, size, 1, size, 0, HAS_DELTA=True, BLOCK=padded(size),
        **tuning.cut("rms_norm", size, x.dtype),
    )  # fmt: skip
    return total, out
