"""Who holds which block: free list, reference counts, and cached blocks in the order of eviction.

After PagedAttention (arXiv 2309.06180, section 4) with the free queue of vLLM's block pool: a
block that nobody refers to but that has a hash stays usable until its place is needed. Sequences
release their blocks last one first, so in that queue a child always stands before its parent:
leaves go first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable


class OutOfBlocks(Exception):  # noqa: N818 - a state, not an error: the scheduler preempts
    """Every block is referred to."""


class BlockPool:
    """Hands out block ids 0 .. num_blocks - 1.

    Every block is in exactly one place: *free* (no hash, no reference), *cached* (hash, no
    reference) or *used* (referred to at least once).

    Args:
        num_blocks: size of the pool.
        on_evict: told the hash of a cached block whose place was taken.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[bytes], None]) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._free: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, bytes] = OrderedDict()
        self._references = [0] * num_blocks
        self._hashes: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can still give."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that something refers to."""
        return self.num_blocks - self.num_available

    def num_references(self, block_id: int) -> int:
        """How many holders the block has."""
        return self._references[block_id]

    def allocate(self) -> int:
        """Return a block with one reference and no hash; evict the oldest cached one if need be.

        Raises:
            OutOfBlocks: none is left.
        """
        if self._free:
            block_id = self._free.popleft()
        elif self._cached:
            block_id, block_hash = self._cached.popitem(last=False)
            del self._hashes[block_id]
            self._on_evict(block_hash)
        else:
            raise OutOfBlocks
        self._references[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """Add a reference to a used or cached block.

        Raises:
            ValueError: the block is free.
        """
        if self._references[block_id] == 0:
            if block_id not in self._cached:
                raise ValueError(f"block {block_id} is free and cannot be shared")
            del self._cached[block_id]
        self._references[block_id] += 1

    def release(self, block_id: int) -> None:
        """Drop one reference; the last one frees the block or, if it has a hash, leaves it cached.

        Raises:
            ValueError: nobody holds it (a double free).
        """
        if self._references[block_id] == 0:
            raise ValueError(f"block {block_id} is released twice")
        self._references[block_id] -= 1
        if self._references[block_id] == 0:
            block_hash = self._hashes.get(block_id)
            if block_hash is None:
                self._free.append(block_id)
            else:
                self._cached[block_id] = block_hash

    def set_hash(self, block_id: int, block_hash: bytes) -> None:
        """Name a used block's content, once.

        Raises:
            ValueError: the block is not used or has a hash.
        """
        if self._references[block_id] == 0 or block_id in self._hashes:
            raise ValueError(f"block {block_id} cannot get a hash now")
        self._hashes[block_id] = block_hash

    def forget_cached(self) -> None:
        """Turn every cached block into a free one; `on_evict` is not called."""
        for block_id in self._cached:
            del self._hashes[block_id]
        self._free.extend(self._cached)
        self._cached.clear()

    def cached_in_eviction_order(self) -> list[bytes]:
        """Hashes of the blocks that nobody refers to, the next to go first."""
        return list(self._cached.values())

    def check(self) -> None:
        """Verify the books.

        Raises:
            ValueError: a block is in two places or in none.
        """
        idle = [*self._free, *self._cached]
        used = [block_id for block_id, count in enumerate(self._references) if count > 0]
        if sorted([*idle, *used]) != list(range(self.num_blocks)):
            raise ValueError("a block is lost or owned twice")
