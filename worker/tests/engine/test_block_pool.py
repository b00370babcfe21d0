"""Block pool: every block in exactly one place, leaves evicted first, no double free."""

import pytest

from headrace_worker.engine.block_pool import BlockPool, OutOfBlocks


def test_gives_each_block_once_and_then_none():
    """A pool of three hands out three different blocks."""
    pool = BlockPool(3, on_evict=lambda _: None)
    assert {pool.allocate() for _ in range(3)} == {0, 1, 2}
    with pytest.raises(OutOfBlocks):
        pool.allocate()


def test_refuses_a_double_free():
    """Releasing what nobody holds is a programmer's mistake and is said."""
    pool = BlockPool(1, on_evict=lambda _: None)
    block_id = pool.allocate()
    pool.release(block_id)
    with pytest.raises(ValueError, match="released twice"):
        pool.release(block_id)


def test_refuses_to_share_a_free_block():
    """A block without holder and name has no content to share."""
    pool = BlockPool(1, on_evict=lambda _: None)
    with pytest.raises(ValueError, match="free"):
        pool.share(0)


def test_keeps_a_named_block_until_its_place_is_needed():
    """A named block without holders can be shared again; free ones are taken before it."""
    evicted: list[bytes] = []
    pool = BlockPool(2, evicted.append)
    named = pool.allocate()
    pool.set_hash(named, b"a")
    pool.release(named)
    assert pool.num_available == 2
    assert pool.allocate() != named
    assert evicted == []
    pool.share(named)
    pool.release(named)
    assert pool.allocate() == named
    assert evicted == [b"a"]


def test_evicts_leaves_before_parents():
    """Blocks released last one first leave in that order."""
    evicted: list[bytes] = []
    pool = BlockPool(3, evicted.append)
    chain = [pool.allocate() for _ in range(3)]
    for block_id, name in zip(chain, (b"root", b"middle", b"leaf"), strict=True):
        pool.set_hash(block_id, name)
    for block_id in reversed(chain):
        pool.release(block_id)
    for _ in range(3):
        pool.allocate()
    assert evicted == [b"leaf", b"middle", b"root"]


def test_a_block_gets_its_hash_once():
    """A second name for one block would leave the first dangling."""
    pool = BlockPool(1, on_evict=lambda _: None)
    block_id = pool.allocate()
    pool.set_hash(block_id, b"a")
    with pytest.raises(ValueError, match="cannot get a hash"):
        pool.set_hash(block_id, b"b")
