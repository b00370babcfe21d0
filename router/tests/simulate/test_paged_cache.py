"""A simulated worker's KV."""

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_router.simulate.paged_cache import PagedCache


def fill(cache: PagedCache, chain: list[int]) -> None:
    depth = cache.match(chain)
    assert cache.try_reserve(chain[:depth], len(chain) - depth)
    for block in chain[depth:]:
        assert cache.store(block)
    cache.release(chain, 0)


def test_the_least_recently_used_goes_first_from_the_tail_on() -> None:
    """The beginning of a prefix outlives its end."""
    cache = PagedCache(6)
    fill(cache, [1, 2, 3])
    fill(cache, [4, 5, 6])
    fill(cache, [1, 7])
    assert cache.match([1, 2, 3]) == 2
    assert cache.match([4, 5, 6]) == 3
    added, removed = cache.take_changes()
    assert (added, removed) == ([1, 2, 3, 4, 5, 6, 7], [3])
    assert cache.take_changes() == ([], [])


def test_blocks_in_use_stay() -> None:
    """A request that does not fit waits, and changes nothing."""
    cache = PagedCache(4)
    assert cache.try_reserve([], 3)
    cache.store(1)
    assert not cache.try_reserve([], 2)
    assert cache.try_reserve([1], 1)
    assert cache.num_used == 4
    cache.release([1], 2)
    assert cache.num_used == 2


@settings(max_examples=100, deadline=None)
@given(requests=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=40))
def test_never_more_than_there_is(requests: list[list[int]]) -> None:
    """Chains of a small tree, several at once: capacity holds and all comes back in the end."""
    cache, running = PagedCache(12), []
    for path in requests:
        chain = [hash(tuple(path[: idx + 1])) for idx in range(len(path))]
        while not cache.try_reserve(shared := chain[: cache.match(chain)], len(chain) + 1):
            done_shared, done_reserved = running.pop(0)
            cache.release(done_shared, done_reserved)
        reserved = len(chain) + 1
        mine = list(shared)
        for block in chain[len(shared) :]:
            if not cache.store(block):
                break
            mine.append(block)
            reserved -= 1
        running.append((mine, reserved))
        assert cache.num_used <= 12
        assert len(cache.hashes()) <= 12
    for mine, reserved in running:
        cache.release(mine, reserved)
    assert cache.num_used == 0
