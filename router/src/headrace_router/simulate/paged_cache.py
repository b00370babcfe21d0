"""Pure: a simulated worker's KV: blocks shared by their hash, least recently used evicted first.

A block is pinned while a running request uses it. Blocks of a request that ends become free from
the tail on, so that of one prefix the end is evicted before the beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PagedCache:
    """Counts blocks; holds no data.

    Args:
        capacity_blocks: all there is.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        # hash -> how many running requests use it; at 0 it is in `_free` too.
        self._users: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict()
        # Blocks set aside for running requests that hold nothing shareable (yet).
        self._reserved = 0
        # Changes since `take_changes`.
        self._added: list[int] = []
        self._removed: list[int] = []

    @property
    def num_used(self) -> int:
        """Blocks that running requests hold."""
        return len(self._users) - len(self._free) + self._reserved

    def hashes(self) -> list[int]:
        """Return every block that is cached."""
        return list(self._users)

    def match(self, chain: Sequence[int]) -> int:
        """Count the leading blocks of *chain* that are cached."""
        for depth, block in enumerate(chain):
            if block not in self._users:
                return depth
        return len(chain)

    def try_reserve(self, shared: Sequence[int], num_blocks: int) -> bool:
        """Pin the cached blocks *shared* and set others aside; tell whether they fit."""
        newly_pinned = sum(1 for block in shared if not self._users[block])
        if self.num_used + newly_pinned + num_blocks > self.capacity_blocks:
            return False
        for block in shared:
            self._pin(block)
        self._reserved += num_blocks
        self._make_room()
        return True

    def store(self, block: int) -> bool:
        """Turn a reserved block into a shared one; False = it is there already, both are kept."""
        if block in self._users:
            return False
        self._reserved -= 1
        self._users[block] = 1
        self._added.append(block)
        return True

    def release(self, shared: Sequence[int], num_reserved: int) -> None:
        """Unpin a request's blocks, first block first in *shared*, and give back what was aside."""
        self._reserved -= num_reserved
        for block in reversed(shared):
            users = self._users[block] = self._users[block] - 1
            if not users:
                self._free[block] = None

    def take_changes(self) -> tuple[list[int], list[int]]:
        """Return what was added and removed since the last call."""
        added, removed = self._added, self._removed
        self._added, self._removed = [], []
        return added, removed

    def _pin(self, block: int) -> None:
        users = self._users[block]
        if not users:
            del self._free[block]
        self._users[block] = users + 1

    def _make_room(self) -> None:
        while len(self._users) + self._reserved > self.capacity_blocks:
            block, _ = self._free.popitem(last=False)
            del self._users[block]
            self._removed.append(block)
