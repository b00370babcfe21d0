"""Pure: blocks that a replica is about to hold, because a request for them is on its way there.

Events come late: without this, a burst of equal prompts would scatter over the fleet. An entry
lives from the decision until shortly after the first token (by then the event has come), at most
`TTL_S`, and no longer than its request.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from headrace_common.kv_index import ReplicaKey

# A prefill on a slow CPU may take long; a leaked entry must end all the same.
TTL_S = 120.0
# Time for the event to arrive after the first token.
GRACE_S = 1.0


class InFlightBlocks:
    """Block chains of requests under way, by replica."""

    def __init__(self) -> None:
        self._counts: dict[ReplicaKey, dict[int, int]] = {}
        self._entries: dict[int, tuple[ReplicaKey, Sequence[int]]] = {}
        self._expiries: list[tuple[float, int]] = []
        self._next_id = 0

    def add(self, replica: ReplicaKey, chain: Sequence[int], now_s: float) -> int:
        """Count *chain* as held by *replica*; return the entry's id."""
        self.expire(now_s)
        self._next_id += 1
        entry_id = self._next_id
        self._entries[entry_id] = (replica, chain)
        heapq.heappush(self._expiries, (now_s + TTL_S, entry_id))
        if not chain:
            return entry_id
        counts = self._counts.setdefault(replica, {})
        for block in chain:
            counts[block] = counts.get(block, 0) + 1
        return entry_id

    def confirm(self, entry_id: int, now_s: float) -> None:
        """The first token is there: the entry ends soon. Unknown ids are ignored."""
        if entry_id in self._entries:
            heapq.heappush(self._expiries, (now_s + GRACE_S, entry_id))

    def remove(self, entry_id: int) -> None:
        """End an entry now. Idempotent."""
        entry = self._entries.pop(entry_id, None)
        if entry is None or not entry[1]:
            return
        replica, chain = entry
        counts = self._counts[replica]
        for block in chain:
            left = counts[block] - 1
            if left:
                counts[block] = left
            else:
                del counts[block]
        if not counts:
            del self._counts[replica]

    def expire(self, now_s: float) -> None:
        """End what is overdue."""
        while self._expiries and self._expiries[0][0] <= now_s:
            self.remove(heapq.heappop(self._expiries)[1])

    def depths(self, chain: Sequence[int]) -> dict[ReplicaKey, int]:
        """Count the leading blocks of *chain* on their way to each replica; zeros are left out."""
        if not chain:
            return {}
        return {
            replica: _prefix_len(chain, counts)
            for replica, counts in self._counts.items()
            if chain[0] in counts
        }

    def num_entries(self) -> int:
        """Count the requests under way whose blocks count."""
        return len(self._entries)


def _prefix_len(chain: Sequence[int], held: dict[int, int]) -> int:
    """Bisect: whole chains are added, so what is held is a prefix."""
    low, high = 1, len(chain)
    while low < high:
        middle = (low + high + 1) // 2
        if chain[middle - 1] in held:
            low = middle
        else:
            high = middle - 1
    return low
