"""Blocks in flight."""

from headrace_common.kv_index import ReplicaKey
from headrace_router.in_flight import GRACE_S, TTL_S, InFlightBlocks

A, B = ReplicaKey("a", 1), ReplicaKey("b", 1)


def test_a_chain_under_way_counts_as_held() -> None:
    """The next request with the same beginning finds it, where it went."""
    blocks = InFlightBlocks()
    blocks.add(A, range(100), 0.0)
    blocks.add(B, (0, 1, 77), 0.0)
    assert blocks.depths([*range(40), 999]) == {A: 40, B: 2}
    assert blocks.depths([999, 5]) == {}
    assert blocks.depths([]) == {}


def test_every_depth_is_found() -> None:
    """Bisection is exact from the first block to the last."""
    for depth in range(1, 20):
        blocks = InFlightBlocks()
        blocks.add(A, range(depth), 0.0)
        assert blocks.depths(range(25)) == {A: depth}


def test_an_entry_ends_with_its_request() -> None:
    """Removed once is removed; what another request holds stays."""
    blocks = InFlightBlocks()
    first, second = blocks.add(A, (1, 2), 0.0), blocks.add(A, (1,), 0.0)
    blocks.remove(first)
    blocks.remove(first)
    assert blocks.depths([1, 2]) == {A: 1}
    blocks.remove(second)
    assert blocks.depths([1, 2]) == {}
    assert blocks.num_entries() == 0


def test_an_entry_ends_soon_after_the_first_token() -> None:
    """By then the event has come; before the grace is over it still counts."""
    blocks = InFlightBlocks()
    entry = blocks.add(A, (1,), 0.0)
    blocks.confirm(entry, 5.0)
    blocks.expire(5.0 + GRACE_S / 2)
    assert blocks.depths([1]) == {A: 1}
    blocks.expire(5.0 + GRACE_S)
    assert blocks.depths([1]) == {}


def test_a_leaked_entry_ends() -> None:
    """Without a first token or an end, time ends it."""
    blocks = InFlightBlocks()
    blocks.add(A, (1,), 0.0)
    blocks.expire(TTL_S)
    assert blocks.num_entries() == 0


def test_a_prompt_without_full_blocks_is_harmless() -> None:
    """There is nothing to count, beside requests that have blocks too."""
    blocks = InFlightBlocks()
    empty, full = blocks.add(A, (), 0.0), blocks.add(A, (1,), 0.0)
    blocks.remove(full)
    blocks.remove(empty)
    assert blocks.depths([1]) == {}
    assert blocks.num_entries() == 0
