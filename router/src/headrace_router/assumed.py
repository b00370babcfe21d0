"""Pure: what replicas probably hold whose engines send no KV events.

Once a prompt's first token came from a replica, its blocks are assumed to be cached there, for a
while. Two mirrors take turns: the younger takes in what is new, both answer, and every half of the
time to live the older is thrown away. So a block is assumed for at least half of that time after
its last use and at most for all of it, and memory is bounded as a mirror's is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace_common.clock import Clock
from headrace_common.kv_index import TIERS, ReplicaKey
from headrace_router.load_guard import LoadGuard
from headrace_router.mirror import PrefixMirror


class AssumedBlocks:
    """A `BookingListener` that remembers which prompts went where.

    Args:
        ttl_s: longest time that a block is assumed; 0 = nothing is.
        max_bytes: bound on memory.
        clock: time.
        is_indexed: whether a replica tells the index what it holds; nothing is assumed of it.
    """

    def __init__(
        self,
        ttl_s: float,
        max_bytes: int,
        clock: Clock,
        is_indexed: Callable[[ReplicaKey], bool],
    ) -> None:
        self._half_life_s, self._half_bytes = ttl_s / 2, max_bytes // 2
        self._clock, self._is_indexed = clock, is_indexed
        self._under_way: dict[LoadGuard, Sequence[int]] = {}
        self._young, self._old = PrefixMirror(self._half_bytes), PrefixMirror(self._half_bytes)
        self._turned_at_s = clock.now_s()

    def booked(self, guard: LoadGuard, chain: Sequence[int]) -> None:
        """Remember a prompt until its first token."""
        if self._half_life_s and chain and not self._is_indexed(guard.replica):
            self._under_way[guard] = chain

    def started(self, guard: LoadGuard) -> None:
        """From now on its blocks are assumed to be there."""
        chain = self._under_way.pop(guard, None)
        if chain is None:
            return
        self._take_turns()
        key = guard.replica
        known = self._young.replicas().get(key)
        if known is None:
            known = self._young.begin("")
            self._young.commit(key, known)
        self._young.add(known, TIERS[0], chain)

    def released(self, guard: LoadGuard) -> None:
        """Forget a prompt that never got a first token."""
        self._under_way.pop(guard, None)

    def depths(self, chain: Sequence[int]) -> dict[ReplicaKey, int]:
        """Count the leading blocks that each replica is assumed to hold; zeros are left out."""
        self._take_turns()
        if not self._young.num_entries() and not self._old.num_entries():
            return {}
        found = self._old.depths(chain)
        for key, depth in self._young.depths(chain).items():
            found[key] = max(depth, found.get(key, 0))
        return {key: depth for key, depth in found.items() if not self._is_indexed(key)}

    def num_entries(self) -> int:
        """Count the blocks that are assumed somewhere."""
        return self._young.num_entries() + self._old.num_entries()

    def _take_turns(self) -> None:
        passed_s = self._clock.now_s() - self._turned_at_s
        if self._half_life_s and passed_s >= self._half_life_s:
            missed_one = passed_s >= 2 * self._half_life_s
            self._old = PrefixMirror(self._half_bytes) if missed_one else self._young
            self._young = PrefixMirror(self._half_bytes)
            self._turned_at_s = self._clock.now_s()
