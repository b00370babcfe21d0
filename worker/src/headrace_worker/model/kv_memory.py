"""Bytes of whole KV blocks, to be carried to another worker and back into a pool.

The bytes are those of the pool's own type, in the order that the layout's name tells, so
two workers whose layouts have the same name may exchange blocks as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class BlockMemory(Protocol):
    """A pool whose blocks can be read and written whole. The engine's thread only."""

    @property
    def layout(self) -> str:
        """Name of the order, the sizes and the type of a block's bytes."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        ...

    def read_blocks(self, block_ids: Sequence[int]) -> bytes:
        """Copy blocks out."""
        ...

    def write_blocks(self, block_ids: Sequence[int], data: bytes) -> None:
        """Copy blocks in; *data* is as `read_blocks` gave it, for as many blocks."""
        ...


def layout_name(kv: torch.Tensor, *, has_key_panels: bool = False) -> str:
    """Name the layout of a pool (layers, 2, blocks, slots, heads, dim).

    Args:
        kv: the pool.
        has_key_panels: keys lie within a block as `native_types.key_panels` has them.
    """
    layers, parts, _, slots, heads, dim = kv.shape
    kind = str(kv.dtype).removeprefix("torch.") + (",key panels" if has_key_panels else "")
    return f"layer{layers},kv{parts},block,slot{slots},head{heads},dim{dim}/{kind}"


def bytes_per_block(kv: torch.Tensor) -> int:
    """Return the bytes of one block over all layers."""
    return kv.element_size() * kv.numel() // kv.shape[2]


@torch.inference_mode()
def read(kv: torch.Tensor, block_ids: Sequence[int]) -> bytes:
    """Copy blocks out of a pool."""
    found = kv[:, :, torch.tensor(block_ids, device=kv.device)].contiguous()
    return found.view(torch.uint8).cpu().numpy().tobytes()


@torch.inference_mode()
def write(kv: torch.Tensor, block_ids: Sequence[int], data: bytes) -> None:
    """Copy blocks into a pool.

    Raises:
        ValueError: the data are not so many blocks.
    """
    if len(data) != len(block_ids) * bytes_per_block(kv):
        raise ValueError(f"{len(data)} bytes are not {len(block_ids)} blocks")
    layers, parts, _, *rest = kv.shape
    came = torch.frombuffer(bytearray(data), dtype=kv.dtype)
    places = torch.tensor(block_ids, device=kv.device)
    kv[:, :, places] = came.reshape(layers, parts, len(block_ids), *rest).to(kv.device)
