"""Copies of whole KV blocks over all layers: copy-on-write, and gathering for a transfer.

Traffic: every byte read and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace_worker.kernels.triton.tuning import UNTUNED, Tuning


@triton.jit
def copy_blocks_kernel(
    source_ptr,
    target_ptr,
    pairs_ptr,
    size,
    stride_source,
    stride_target,
    BLOCK: tl.constexpr,
):
    """One program per pair, plane (layer, keys or values) and run of BLOCK values."""
    pair = tl.program_id(0)
    plane = tl.program_id(1).to(tl.int64)
    offset = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < size
    source = tl.load(pairs_ptr + 2 * pair).to(tl.int64)
    target = tl.load(pairs_ptr + 2 * pair + 1).to(tl.int64)
    values = tl.load(source_ptr + plane * stride_source + source * size + offset, mask=inside)
    tl.store(target_ptr + plane * stride_target + target * size + offset, values, mask=inside)


def copy_blocks(
    source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor, tuning: Tuning = UNTUNED
) -> None:
    """See `reference.copy_blocks`; both pools contiguous."""
    planes = source.shape[0] * 2
    size = source[0, 0, 0].numel()
    cut = tuning.cut("copy_blocks", size, source.dtype)
    grid = (len(pairs), planes, triton.cdiv(size, cut["BLOCK"]))
    copy_blocks_kernel[grid](
        source, target, pairs, size, source.shape[2] * size, target.shape[2] * size, **cut
    )
