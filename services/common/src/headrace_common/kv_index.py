"""The prefix index in Redis: key names and encodings, shared by its writer and its readers.

::

    headrace:{kv}:replicas                          HASH   worker id -> RegistryEntry
    headrace:{kv}:deltas                            STREAM field "d" = IndexDelta, capped
    headrace:{kv}:blocks:<model>:<worker>:<incarnation>:<tier>
                                                    SET    8-byte block hashes, with a TTL
    headrace:{kv}:bookings                          CHANNEL BookingNews, between routers

A hash is cut to its first 8 bytes: a collision sends a request to the wrong replica, it never
shares a cache, since workers compare whole hashes. All keys carry one hash tag, so that scripts
may touch them together on a Redis cluster too.
"""

from __future__ import annotations

import re
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias
from urllib.parse import quote

from headrace_common.blocks import HASH_BYTES
from headrace_contracts.types.v1.types_pb2 import (
    CACHE_TIER_CPU,
    CACHE_TIER_DISK,
    CACHE_TIER_GPU,
    CacheTier,
    ReplicaRef,
)

SHORT_HASH_BYTES: Final = 8
DELTA_FIELD: Final = b"d"
Tier: TypeAlias = CacheTier.ValueType
TIERS: Final[tuple[Tier, ...]] = (CACHE_TIER_GPU, CACHE_TIER_CPU, CACHE_TIER_DISK)
_ENTRY = re.compile(r"(\d{20})\|(\d+)\|(\d+)\|(\d+)\|(.*)", re.DOTALL)


class ReplicaKey(NamedTuple):
    """One life of one worker, as a dictionary key."""

    worker_id: str
    incarnation: int

    @classmethod
    def of(cls, ref: ReplicaRef) -> ReplicaKey:
        """Take the key out of a message."""
        return cls(ref.worker_id, ref.incarnation)

    def to_ref(self) -> ReplicaRef:
        """Return the message."""
        return ReplicaRef(worker_id=self.worker_id, incarnation=self.incarnation)

    def __str__(self) -> str:
        return f"{self.worker_id}#{self.incarnation}"


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    """What the registry holds of the live incarnation of a worker.

    Lua scripts read and write the same text; incarnations have 20 digits there, so that comparing
    text compares numbers.
    """

    incarnation: int
    # Last batch that is in the sets.
    seq: int
    lease_unix_ms: int
    capacity_blocks: int
    model: str

    def encode(self) -> str:
        """Return the registry's text."""
        return (
            f"{pad(self.incarnation)}|{self.seq}|{self.lease_unix_ms}"
            f"|{self.capacity_blocks}|{self.model}"
        )

    @classmethod
    def decode(cls, text: bytes) -> RegistryEntry:
        """Parse the registry's text.

        Raises:
            ValueError: it was not written by `encode`.
        """
        match = _ENTRY.fullmatch(text.decode())
        if match is None:
            raise ValueError(f"not a registry entry: {text[:100]!r}")
        incarnation, seq, lease, capacity, model = match.groups()
        return cls(int(incarnation), int(seq), int(lease), int(capacity), model)


class IndexKeys:
    """Every Redis key of the index.

    Args:
        prefix: what all keys start with; its braces are the cluster's hash tag.
    """

    def __init__(self, prefix: str = "headrace:{kv}") -> None:
        self._prefix = prefix
        self.registry = f"{prefix}:replicas"
        self.deltas = f"{prefix}:deltas"
        self.bookings = f"{prefix}:bookings"

    def blocks(self, model: str, replica: ReplicaKey, tier: Tier) -> str:
        """Name the set of one replica's blocks on one tier."""
        worker = quote(replica.worker_id, safe="")
        tail = f"{worker}:{replica.incarnation}:{tier}"
        return f"{self._prefix}:blocks:{quote(model, safe='')}:{tail}"

    def all_blocks(self, model: str, replica: ReplicaKey) -> list[str]:
        """Name the sets of one replica, in the order of `TIERS`."""
        return [self.blocks(model, replica, tier) for tier in TIERS]


def pad(incarnation: int) -> str:
    """Write an incarnation so that text compares as numbers do."""
    return f"{incarnation:020d}"


def shorten(joined: bytes) -> list[bytes]:
    """Split joined 16-byte hashes and cut each to 8 bytes.

    Raises:
        ValueError: the length is no multiple of 16.
    """
    if len(joined) % HASH_BYTES:
        raise ValueError(f"block hashes: {len(joined)} bytes is no multiple of {HASH_BYTES}")
    return [joined[i : i + SHORT_HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)]


def chain_ints(joined: bytes) -> array[int]:
    """Read joined 16-byte hashes as the integers that mirrors keep.

    An array, not a tuple: a long prompt's numbers are made only where a lookup touches them.

    Raises:
        ValueError: the length is no multiple of 16.
    """
    if len(joined) % HASH_BYTES:
        raise ValueError(f"block hashes: {len(joined)} bytes is no multiple of {HASH_BYTES}")
    halves = array("Q", joined)
    if sys.byteorder == "big":
        halves.byteswap()
    return halves[::2]


def short_ints(joined: bytes) -> tuple[int, ...]:
    """Read joined 8-byte hashes as integers.

    Raises:
        ValueError: the length is no multiple of 8.
    """
    if len(joined) % SHORT_HASH_BYTES:
        raise ValueError(f"short hashes: {len(joined)} bytes is no multiple of {SHORT_HASH_BYTES}")
    return struct.unpack(f"<{len(joined) // SHORT_HASH_BYTES}Q", joined)


def pack_ints(hashes: Sequence[int]) -> bytes:
    """Join hashes that are held as integers, 8 bytes each; the inverse of `short_ints`."""
    return struct.pack(f"<{len(hashes)}Q", *hashes)
