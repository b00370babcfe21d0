"""Quantised matrices in the layout that the CPU kernels read.

A row is a run of groups of 32 weights. One group is one of

- q4, 24 bytes: float32 scale, float32 offset, 16 bytes of which the low halves are weights 0..15
  and the high halves 16..31; weight = scale * q + offset, q in 0..15. GGUF's Q4_1, and Q4_0 with
  offset = -8 * scale; Q4_K, whose groups' scales and offsets are multiplied out.
- q8, 36 bytes: float32 scale, 32 int8; weight = scale * q. GGUF's Q8_0, and Q5_0.
- q8 in halves, 40 bytes: two float32 scales, one for each 16 of the 32 int8. GGUF's Q6_K.
- f32, 128 bytes: the weights themselves.

Scales were widened and multiplied out, nothing else, so these are the file's weights exactly, bit
for bit what dequantising them to float32 gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gguf import quants

GROUP = 32
KIND_F32, KIND_Q4, KIND_Q8, KIND_Q8_HALVES = 0, 1, 2, 3
_KIND_OF_GROUP_BYTES = {
    4 * GROUP: KIND_F32,
    8 + GROUP // 2: KIND_Q4,
    4 + GROUP: KIND_Q8,
    8 + GROUP: KIND_Q8_HALVES,
}
# Groups in a super-block of GGUF's K kinds.
_K_GROUPS = 8

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
        """One of KIND_F32, KIND_Q4, KIND_Q8, KIND_Q8_HALVES."""
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
    read = _READERS.get(kind)
    if read is None:
        return None
    heads, values = read(raw)
    parts = (np.ascontiguousarray(heads, dtype=np.float32).view(np.uint8), values.view(np.uint8))
    return np.ascontiguousarray(np.concatenate(parts, axis=-1).reshape(len(raw), -1))


# A reader returns (rows, groups, scales in a group) float32 and (rows, groups, bytes) of values.
_Parts = tuple[np.ndarray[Any, np.dtype[np.float32]], np.ndarray[Any, Any]]


def _floats(raw: ByteArray) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _simple(raw: ByteArray, head_bytes: int, value_bytes: int) -> tuple[Any, ByteArray]:
    groups = raw.reshape(len(raw), -1, head_bytes + value_bytes)
    return _floats(groups[..., :head_bytes]), groups[..., head_bytes:]


def _q4_0(raw: ByteArray) -> _Parts:
    scale, nibbles = _simple(raw, 2, GROUP // 2)
    return np.concatenate((scale, -8 * scale), axis=-1), nibbles


def _q5_0(raw: ByteArray) -> _Parts:
    groups = raw.reshape(len(raw), -1, 2 + 4 + GROUP // 2)
    fifth = np.unpackbits(groups[..., 2:6], axis=-1, bitorder="little")
    low = np.concatenate((groups[..., 6:] & 15, groups[..., 6:] >> 4), axis=-1)
    return _floats(groups[..., :2]), (low | fifth << 4).astype(np.int8) - 16


def _q4_k(raw: ByteArray) -> _Parts:
    blocks = raw.reshape(-1, 144)
    scale, minimum = (_floats(blocks[:, i : i + 2]) for i in (0, 2))
    multiples, minimums = quants.Q4_K.get_scale_min(blocks[:, 4:16])
    heads = np.stack((scale * multiples, -(minimum * minimums)), axis=-1)
    # Each 32 bytes hold one group in the low halves and the next in the high ones.
    packed = blocks[:, 16:].reshape(-1, _K_GROUPS // 2, 1, GROUP)
    values = np.concatenate((packed & 15, packed >> 4), axis=2).reshape(-1, _K_GROUPS, GROUP)
    nibbles = values[..., : GROUP // 2] | values[..., GROUP // 2 :] << 4
    return heads.reshape(len(raw), -1, 2), nibbles.reshape(len(raw), -1, GROUP // 2)


def _q6_k(raw: ByteArray) -> _Parts:
    blocks = raw.reshape(-1, 210)
    packed = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate((packed & 15, packed >> 4), axis=2).reshape(-1, _K_GROUPS, GROUP)
    upper = blocks[:, 128:192].reshape(-1, 2, 1, GROUP)
    high = np.concatenate([upper >> shift & 3 for shift in (0, 2, 4, 6)], axis=2)
    values = (low | high.reshape(-1, _K_GROUPS, GROUP) << 4).astype(np.int8) - 32
    multiples = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    heads = _floats(blocks[:, 208:]) * multiples
    return heads.reshape(len(raw), -1, 2), values.reshape(len(raw), -1, GROUP)


_READERS: Mapping[str, Callable[[ByteArray], _Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": lambda raw: _simple(raw, 4, GROUP // 2),
    "Q8_0": lambda raw: _simple(raw, 2, GROUP),
    "Q5_0": _q5_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
