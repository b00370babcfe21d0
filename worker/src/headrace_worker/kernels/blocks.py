"""Quantised matrices in the layout that the CPU kernels read.

A row is a run of groups of 32 weights. One group is one of

- q4, 24 bytes: float32 scale, float32 offset, 16 bytes of which the low halves are weights 0..15
  and the high halves 16..31; weight = scale * q + offset, q in 0..15. GGUF's Q4_1, and Q4_0 with
  offset = -8 * scale.
- q8, 36 bytes: float32 scale, 32 int8; weight = scale * q. GGUF's Q8_0.
- f32, 128 bytes: the weights themselves.

Only the float16 scales were widened, so these are the file's weights exactly, bit for bit what
dequantising them to float32 gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

GROUP = 32
KIND_F32, KIND_Q4, KIND_Q8 = 0, 1, 2
_KIND_OF_GROUP_BYTES = {4 * GROUP: KIND_F32, 8 + GROUP // 2: KIND_Q4, 4 + GROUP: KIND_Q8}

ByteArray = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class BlockMatrix:
    """A matrix (num_out, num_in) in groups.

    Attributes:
        data: (num_out, bytes per row) uint8, contiguous.
        num_in: columns, a multiple of 32.
    """

    data: torch.Tensor
    num_in: int

    def __post_init__(self) -> None:
        if self.num_in % GROUP or not self.data.is_contiguous():
            raise ValueError("a block matrix is contiguous and has whole groups of 32 columns")

    @property
    def num_out(self) -> int:
        """Rows."""
        return len(self.data)

    @property
    def kind(self) -> int:
        """KIND_F32, KIND_Q4 or KIND_Q8."""
        return _KIND_OF_GROUP_BYTES[self.data.shape[1] * GROUP // self.num_in]


def from_float(weight: torch.Tensor) -> BlockMatrix:
    """View a contiguous float32 (out, in) as f32 groups, without a copy."""
    return BlockMatrix(weight.view(torch.uint8), weight.shape[1])


def from_gguf(raw: ByteArray, kind: str) -> ByteArray | None:
    """Convert the rows of a GGUF tensor; None if its kind has no layout here.

    Args:
        raw: (num_out, bytes per row) as in the file.
        kind: GGUF's name of the type.
    """
    if kind not in ("Q4_0", "Q4_1", "Q8_0"):
        return None
    head_bytes = 4 if kind == "Q4_1" else 2
    group_bytes = head_bytes + (GROUP if kind == "Q8_0" else GROUP // 2)
    groups = raw.reshape(len(raw), -1, group_bytes)
    heads = np.ascontiguousarray(groups[..., :head_bytes]).view(np.float16).astype(np.float32)
    if kind == "Q4_0":
        heads = np.concatenate((heads, -8 * heads), axis=-1)
    parts = (heads.view(np.uint8), groups[..., head_bytes:])
    return np.concatenate(parts, axis=-1).reshape(len(raw), -1)
