"""The gate of the feed-forward part: act(gate) * up of rows that hold both side by side.

Traffic per row: 2F values read, F written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace_worker.kernels.triton.launch import check_last_contiguous
from headrace_worker.kernels.triton.tuning import UNTUNED, Tuning


@triton.jit
def gated_kernel(gate_up_ptr, out_ptr, size, HAS_GELU: tl.constexpr, BLOCK: tl.constexpr):
    """One program per row and run of BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < size
    start = gate_up_ptr + row * 2 * size + cols
    gate = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + size, mask=inside, other=0.0).to(tl.float32)
    if HAS_GELU:
        # By tanh (arXiv 1606.08415); 0.5 (1 + tanh z) is the logistic function of 2z.
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        activated = gate * tl.sigmoid(inner)
    else:
        activated = gate * tl.sigmoid(gate)
    tl.store(out_ptr + row * size + cols, (activated * up).to(out_ptr.dtype.element_ty), inside)


def silu_mul(gate_up: torch.Tensor, tuning: Tuning = UNTUNED) -> torch.Tensor:
    """See `reference.silu_mul`."""
    return _launch(gate_up, tuning, has_gelu=False)


def gelu_mul(gate_up: torch.Tensor, tuning: Tuning = UNTUNED) -> torch.Tensor:
    """See `reference.gelu_mul`."""
    return _launch(gate_up, tuning, has_gelu=True)


def _launch(gate_up: torch.Tensor, tuning: Tuning, *, has_gelu: bool) -> torch.Tensor:
    check_last_contiguous(gate_up)
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    cut = tuning.cut("gated", size, gate_up.dtype)
    grid = (num_rows, triton.cdiv(size, cut["BLOCK"]))
    gated_kernel[grid](gate_up, out, size, HAS_GELU=has_gelu, **cut)
    return out
