"""Which block holds which content: block hash -> block id.

Only full blocks have a hash, and a hash names the whole prefix up to its block (see
`headrace_common.blocks`), under a key that separates models, adapters and tenants: what a tenant
cannot hash it cannot hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace_worker.engine.block_pool import BlockPool


class CacheListener(Protocol):
    """Is told what enters and leaves the cache, in order."""

    # Of a chain only every n-th block is told: the n-th, the 2n-th, ...
    index_stride: int

    def stored(self, block_hashes: Sequence[bytes]) -> None:
        """New hashes, a chain, parents first."""
        ...

    def removed(self, block_hash: bytes) -> None:
        """The only copy is gone, of a block that was told or of another one."""
        ...

    def cleared(self) -> None:
        """Everything is gone."""
        ...


class BlockHolder(Protocol):
    """Holds blocks beside the sequences, and only as long as these have room."""

    @property
    def block_table(self) -> Sequence[int]:
        """What it holds."""
        ...

    def close(self) -> None:
        """Let go of all blocks."""
        ...


class PrefixCache:
    """The block pool with names for its contents. There is at most one block per hash.

    Args:
        num_blocks: size of the pool.
        listener: told of every change.
    """

    def __init__(self, num_blocks: int, listener: CacheListener) -> None:
        self.pool = BlockPool(num_blocks, self._evicted)
        self._block_ids: dict[bytes, int] = {}
        self._listener = listener
        # Who holds blocks without being a sequence; each adds and removes itself.
        self.holders: list[BlockHolder] = []

    def __len__(self) -> int:
        """Return the number of blocks with a hash, used ones included."""
        return len(self._block_ids)

    def match(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest leading run that is held. Takes no reference."""
        found: list[int] = []
        for block_hash in block_hashes:
            block_id = self._block_ids.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def register(self, block_table: list[int], first_idx: int, hashes: Sequence[bytes]) -> None:
        """Name full blocks of a sequence, from `block_table[first_idx]` on, parents first.

        Where the content is held already, the table's entry is replaced by the block that holds it
        and the duplicate is released. So whoever holds a named block holds its named ancestors too.
        """
        new: list[bytes] = []
        stride = self._listener.index_stride
        for idx, block_hash in enumerate(hashes, first_idx):
            block_id, held_by = block_table[idx], self._block_ids.get(block_hash)
            if held_by is None:
                self.pool.set_hash(block_id, block_hash)
                self._block_ids[block_hash] = block_id
                if (idx + 1) % stride == 0:
                    new.append(block_hash)
            elif held_by != block_id:
                self.pool.share(held_by)
                self.pool.release(block_id)
                block_table[idx] = held_by
        if new:
            self._listener.stored(new)

    def try_reclaim(self) -> bool:
        """Take back what is held beside the sequences; False if that is nothing."""
        was_held = any(holder.block_table for holder in self.holders)
        for holder in list(self.holders):
            holder.close()
        return was_held

    def clear(self) -> None:
        """Forget everything that no sequence holds.

        Raises:
            ValueError: some sequence still holds a block.
        """
        if self.pool.num_used:
            raise ValueError("the cache can be cleared only while nothing runs")
        self.pool.forget_cached()
        self._block_ids.clear()
        self._listener.cleared()

    def check(self) -> None:
        """Verify the books.

        Raises:
            ValueError: pool and names disagree.
        """
        self.pool.check()
        if len(set(self._block_ids.values())) != len(self._block_ids):
            raise ValueError("one block has two hashes")
        if not set(self.pool.cached_in_eviction_order()) <= self._block_ids.keys():
            raise ValueError("a cached block has no name")

    def _evicted(self, block_hash: bytes) -> None:
        del self._block_ids[block_hash]
        self._listener.removed(block_hash)
