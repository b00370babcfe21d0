"""Token ids as they travel: never as Python's numbers, of which a long prompt has thousands. Pure.

A conversation grows at its end, so most of what a prompt is made of was encoded before: the pieces
between a template's control tokens are remembered, each tenant's apart, as a shared memory would
tell one tenant by its speed what another has sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headrace_common.blocks import ID_BYTES, packed_ids, unpacked_ids
from headrace_contracts.worker.v1.worker_pb2 import TokenSequence

# What one piece takes in memory beside its text and ids: objects and a place in a dictionary.
_ENTRY_BYTES = 400


@dataclass(frozen=True, slots=True)
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
    def joined(cls, pieces: Iterable[TokenIds]) -> TokenIds:
        """Put pieces one behind the other."""
        pieces = list(pieces)
        return cls(
            b"".join([piece.packed for piece in pieces]),
            b"".join([piece.varints for piece in pieces]),
        )

    def __len__(self) -> int:
        return len(self.packed) // ID_BYTES

    def listed(self) -> list[int]:
        """Return them as numbers."""
        return unpacked_ids(self.packed)


class PieceMemory:
    """Remembers how texts were encoded, up to a bound; the longest unused are forgotten first.

    Args:
        max_bytes: about the most that it holds.
    """

    def __init__(self, max_bytes: int = 8 * 2**20) -> None:
        # Two halves: what is asked for moves to the new one, which becomes the old when it is full.
        self._max_half_bytes = max_bytes // 2
        self._num_bytes = 0
        self._new: dict[tuple[bytes, str], TokenIds] = {}
        self._old: dict[tuple[bytes, str], TokenIds] = {}

    def ids(self, owner: bytes, text: str, encode: Callable[[str], list[int]]) -> TokenIds:
        """Return a text's ids.

        Args:
            owner: whose it is: nobody learns what others' texts are remembered.
            text: of one piece.
            encode: makes the ids of a text that is not remembered.
        """
        key = owner, text
        found = self._new.get(key)
        if found is None:
            found = self._old.get(key) or TokenIds.of(encode(text))
            self._remember(key, found)
        return found

    def _remember(self, key: tuple[bytes, str], ids: TokenIds) -> None:
        num_bytes = _ENTRY_BYTES + 2 * len(key[1]) + len(ids.packed) + len(ids.varints)
        # What is very long would push out all the rest.
        if num_bytes > self._max_half_bytes // 8:
            return
        if self._num_bytes + num_bytes > self._max_half_bytes:
            self._old, self._new, self._num_bytes = self._new, {}, 0
        self._new[key] = ids
        self._num_bytes += num_bytes
