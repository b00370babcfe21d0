"""Blocks out of and into the prefix cache, between two steps of the engine.

What comes in becomes cached content like any other: named by its hash, told to the index, evicted
when its place is needed. While an import goes on its blocks are held, so that in the end they are
released last one first, as a sequence does it: leaves go before their parents. When a
stream needs their room, or nothing else could run, the import ends with what it has.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace_worker.engine.block_pool import OutOfBlocks
from headrace_worker.engine.prefix_cache import PrefixCache
from headrace_worker.model.kv_memory import BlockMemory


def export(cache: PrefixCache, memory: BlockMemory, hashes: Sequence[bytes]) -> bytes:
    """Read the leading run of *hashes* that is held. Engine thread only."""
    block_ids = cache.match(hashes)
    return memory.read_blocks(block_ids) if block_ids else b""


class BlockImport:
    """Blocks of one prompt on their way into the cache. Engine thread only.

    Args:
        memory: where their bytes go.
        reserve_blocks: blocks that stay available for what runs.
    """

    def __init__(self, memory: BlockMemory, reserve_blocks: int) -> None:
        self._memory, self._reserve_blocks = memory, reserve_blocks
        self._cache: PrefixCache | None = None
        self._table: list[int] = []

    @property
    def block_table(self) -> list[int]:
        """Blocks that it holds, in the prompt's order."""
        return self._table

    def begin(self, cache: PrefixCache, hashes: Sequence[bytes]) -> int:
        """Hold what the cache has of the prompt already; return how many blocks that is."""
        self._cache = cache
        cache.holders.append(self)
        for block_id in cache.match(hashes):
            cache.pool.share(block_id)
            self._table.append(block_id)
        return len(self._table)

    def add(self, cache: PrefixCache, hashes: Sequence[bytes], data: bytes) -> bool:
        """Take in the next blocks of the prompt; False if there is no room for them.

        Raises:
            ValueError: the data are not so many blocks.
        """
        if cache is not self._cache:
            return False
        pool, first_idx = cache.pool, len(self._table)
        if pool.num_available < len(hashes) + self._reserve_blocks:
            return False
        try:
            self._table += [pool.allocate() for _ in hashes]
        except OutOfBlocks:
            return False
        self._memory.write_blocks(self._table[first_idx:], data)
        cache.register(self._table, first_idx, hashes)
        return True

    def close(self) -> None:
        """Let go of all blocks; they stay cached, and no more are taken. Idempotent."""
        if self._cache is not None:
            for block_id in reversed(self._table):
                self._cache.pool.release(block_id)
            self._cache.holders.remove(self)
        self._table, self._cache = [], None
