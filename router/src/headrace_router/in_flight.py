"""Pure: blocks that a replica is about to hold, because a request for them is on its way there.

Events come late: without this, a burst of equal prompts would scatter over the fleet. An entry
lives from the decision until shortly after the first token (by then the event has come), at most
`TTL_S`, and no longer than its request.

A block is held while it came more often than it went. Both are counted at the speed of C, since
whole prompts come and go with each decision; counts of what is gone are thrown away from time to
time.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from headrace_common.kv_index import ReplicaKey

# A prefill on a slow CPU may take long; a leaked entry must end all the same.
TTL_S = 120.0
# Time for the event to arrive after the first token.
GRACE_S = 1.0
# Blocks that went, beyond those that are there, before all is counted anew.
_MAX_GONE_BLOCKS = 4096


class _Held:
    """Blocks on their way to one replica."""

    def __init__(self) -> None:
        self._chains: dict[int, Sequence[int]] = {}
        self._came: Counter[int] = Counter()
        self._went: Counter[int] = Counter()
        self._num_there = self._num_gone = 0

    def __bool__(self) -> bool:
        return bool(self._chains)

    def add(self, entry_id: int, chain: Sequence[int]) -> None:
        self._chains[entry_id] = chain
        self._came.update(chain)
        self._num_there += len(chain)

    def remove(self, entry_id: int) -> None:
        chain = self._chains.pop(entry_id)
        self._went.update(chain)
        self._num_there -= len(chain)
        self._num_gone += len(chain)
        if self._num_gone > self._num_there + _MAX_GONE_BLOCKS:
            self._count_anew()

    def prefix_len(self, chain: Sequence[int]) -> int:
        """Bisect: whole chains are added, so what is held is a prefix."""
        came, went = self._came.get, self._went.get
        if came(chain[0], 0) <= went(chain[0], 0):
            return 0
        low, high = 1, len(chain)
        while low < high:
            middle = (low + high + 1) // 2
            block = chain[middle - 1]
            if came(block, 0) > went(block, 0):
                low = middle
            else:
                high = middle - 1
        return low

    def _count_anew(self) -> None:
        self._came, self._went, self._num_gone = Counter(), Counter(), 0
        for chain in self._chains.values():
            self._came.update(chain)


class InFlightBlocks:
    """Block chains of requests under way, by replica."""

    def __init__(self) -> None:
        self._held: dict[ReplicaKey, _Held] = {}
        self._entries: dict[int, tuple[ReplicaKey, bool]] = {}
        self._expiries: list[tuple[float, int]] = []
        self._next_id = 0

    def add(self, replica: ReplicaKey, chain: Sequence[int], now_s: float) -> int:
        """Count *chain* as held by *replica*; return the entry's id."""
        self.expire(now_s)
        self._next_id += 1
        entry_id = self._next_id
        self._entries[entry_id] = (replica, bool(chain))
        heapq.heappush(self._expiries, (now_s + TTL_S, entry_id))
        if chain:
            self._held.setdefault(replica, _Held()).add(entry_id, chain)
        return entry_id

    def confirm(self, entry_id: int, now_s: float) -> None:
        """The first token is there: the entry ends soon. Unknown ids are ignored."""
        if entry_id in self._entries:
            heapq.heappush(self._expiries, (now_s + GRACE_S, entry_id))

    def remove(self, entry_id: int) -> None:
        """End an entry now. Idempotent."""
        replica, has_blocks = self._entries.pop(entry_id, (None, False))
        if replica is None or not has_blocks:
            return
        held = self._held[replica]
        held.remove(entry_id)
        if not held:
            del self._held[replica]

    def expire(self, now_s: float) -> None:
        """End what is overdue."""
        while self._expiries and self._expiries[0][0] <= now_s:
            self.remove(heapq.heappop(self._expiries)[1])

    def depths(self, chain: Sequence[int]) -> dict[ReplicaKey, int]:
        """Count the leading blocks of *chain* on their way to each replica; zeros are left out."""
        if not chain:
            return {}
        depths = {replica: held.prefix_len(chain) for replica, held in self._held.items()}
        return {replica: depth for replica, depth in depths.items() if depth}

    def num_entries(self) -> int:
        """Count the requests under way whose blocks count."""
        return len(self._entries)
