"""Token ids as they travel: never as Python's numbers, of which a long prompt has thousands. Pure.

A conversation grows at its end, so most of what a prompt is made of was encoded before: the pieces
between a template's control tokens are remembered, and the hashes of blocks. Each tenant's apart:
a shared memory would tell one tenant, by its speed, what another has sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from headrace_common.blocks import (
    HASH_BYTES,
    ID_BYTES,
    ROOT,
    chain_packed,
    packed_ids,
    unpacked_ids,
)
from headrace_contracts.worker.v1.worker_pb2 import TokenSequence

# What one piece takes in memory beside its text and ids: objects and a place in a dictionary.
_ENTRY_BYTES = 400
# Blocks whose hashes are remembered together.
_STRETCH_BLOCKS = 8

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class TokenIds:
    """Token ids in order.

    Args:
        packed: as they are hashed (`blocks`).
        varints: as protobuf writes a field of them, without its head.
    """

    packed: bytes
    varints: bytes

    @classmethod
    def of(cls, ids: Sequence[int]) -> TokenIds:
        """Take ids."""
        wire = TokenSequence(token_ids=ids).SerializeToString()
        # Behind the field's tag and length.
        head = 1
        while head < len(wire) and wire[head] & 128:
            head += 1
        return cls(packed_ids(ids), wire[head + 1 :])

    @classmethod
    def joined(cls, pieces: Sequence[TokenIds]) -> TokenIds:
        """Put pieces one behind the other."""
        return cls(
            b"".join([piece.packed for piece in pieces]),
            b"".join([piece.varints for piece in pieces]),
        )

    def __len__(self) -> int:
        return len(self.packed) // ID_BYTES

    def listed(self) -> list[int]:
        """Return them as numbers."""
        return unpacked_ids(self.packed)


class _Memory(ABC, Generic[K, V]):
    """Keeps what is used, up to a bound of bytes."""

    def __init__(self, max_bytes: int) -> None:
        # Two halves: what is asked for moves to the new one, which becomes the old when it is full.
        self._max_half_bytes = max_bytes // 2
        self._num_bytes = 0
        # The new one; where most that is asked for is.
        self.recent: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        """Return what is remembered; None = nothing is."""
        found = self.recent.get(key)
        if found is None and (found := self._old.pop(key, None)) is not None:
            self.put(key, found)
        return found

    def put(self, key: K, value: V) -> None:
        """Remember a value; what would push out all the rest is left out."""
        num_bytes = self._size_bytes(key, value) + _ENTRY_BYTES
        if num_bytes > self._max_half_bytes // 8:
            return
        if self._num_bytes + num_bytes > self._max_half_bytes:
            self._old, self.recent, self._num_bytes = self.recent, {}, 0
        self.recent[key] = value
        self._num_bytes += num_bytes

    @abstractmethod
    def _size_bytes(self, key: K, value: V) -> int:
        """Return what a key and its value hold."""


class PieceMemory(_Memory[tuple[bytes, str], TokenIds]):
    """Remembers how texts were encoded, by whose they are: nobody learns of others' texts."""

    def __init__(self, max_bytes: int = 8 * 2**20) -> None:
        super().__init__(max_bytes)

    def _size_bytes(self, key: tuple[bytes, str], value: TokenIds) -> int:
        return 2 * len(key[1]) + len(value.packed) + len(value.varints)


class _StretchMemory(_Memory[bytes, bytes]):
    """Hashes of a stretch, by what they are of."""

    def _size_bytes(self, key: bytes, value: bytes) -> int:
        return len(key) + len(value)


class ChainMemory:
    """Remembers the hashes of stretches of blocks that prompts begin with."""

    def __init__(self, max_bytes: int = 4 * 2**20) -> None:
        self._memory = _StretchMemory(max_bytes)

    def chain(self, key: bytes, packed: bytes, block_size: int) -> bytes:
        """Return `blocks.chain_packed`, joined. *key* holds the owner's salt."""
        width, parent, joined = _STRETCH_BLOCKS * block_size * ID_BYTES, ROOT, []
        for start in range(0, len(packed) - width + 1, width):
            stretch = key + parent + packed[start : start + width]
            hashes = self._memory.get(stretch)
            if hashes is None:
                stretch_ids = packed[start : start + width]
                hashes = b"".join(chain_packed(key, stretch_ids, block_size, parent))
                self._memory.put(stretch, hashes)
            joined.append(hashes)
            parent = hashes[-HASH_BYTES:]
        rest = packed[len(packed) // width * width :]
        joined += chain_packed(key, rest, block_size, parent)
        return b"".join(joined)
