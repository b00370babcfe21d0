"""What all launches need: sizes of tiles and the check that tensors lie as kernels read them."""

from __future__ import annotations

import torch
import triton

# The matrix units take tiles of at least 16.
MIN_DOT = 16


def padded(size: int, least: int = 1) -> int:
    """The next power of two, which is what a tile must have."""
    return max(least, triton.next_power_of_2(size))


def check_last_contiguous(*tensors: torch.Tensor) -> None:
    """Refuse tensors whose last dimension is strided.

    Raises:
        ValueError: a kernel would read something else than meant.
    """
    for tensor in tensors:
        if tensor.stride(-1) != 1:
            raise ValueError("a kernel takes tensors whose last dimension is contiguous")


def precision(dtype: torch.dtype) -> str:
    """How `tl.dot` multiplies: float32 in full precision, all else as it is."""
    return "ieee" if dtype == torch.float32 else "tf32"
