"""Prefix cache against an oracle: what it matches is what was computed, chains stay whole."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace_common.blocks import chain, chain_key
from headrace_worker.engine.block_pool import OutOfBlocks
from headrace_worker.engine.prefix_cache import PrefixCache

SIZE = 2


class Listener:
    """Follows the events as an index would."""

    index_stride = 1

    def __init__(self) -> None:
        self.held: dict[bytes, None] = {}

    def stored(self, block_hashes) -> None:
        for block_hash in block_hashes:
            assert block_hash not in self.held
            self.held[block_hash] = None

    def removed(self, block_hash) -> None:
        del self.held[block_hash]

    def cleared(self) -> None:
        self.held.clear()


def hold(cache: PrefixCache, key: bytes, tokens: list[int]) -> list[int]:
    """Do what the scheduler does for one sequence: match, share, allocate, name."""
    hashes = chain(key, tokens, SIZE)
    hits = cache.match(hashes)
    for block_id in hits:
        cache.pool.share(block_id)
    table = list(hits)
    try:
        while len(table) < len(hashes):
            table.append(cache.pool.allocate())
    except OutOfBlocks:
        release(cache, table)
        raise
    cache.register(table, len(hits), hashes[len(hits) :])
    return table


def release(cache: PrefixCache, table: list[int]) -> None:
    for block_id in reversed(table):
        cache.pool.release(block_id)


def test_finds_the_longest_run_that_is_held():
    """A match ends at the first block that is not held."""
    cache = PrefixCache(8, Listener())
    key = chain_key("m")
    table = hold(cache, key, [1, 2, 3, 4])
    assert cache.match(chain(key, [1, 2, 3, 4, 5, 6], SIZE)) == table
    assert cache.match(chain(key, [1, 2, 9, 9], SIZE)) == table[:1]
    assert cache.match(chain(key, [9, 2, 3, 4], SIZE)) == []


def test_tenants_never_share():
    """The same tokens under another salt or adapter do not match."""
    cache = PrefixCache(8, Listener())
    hold(cache, chain_key("m", "", b"tenant-a"), [1, 2, 3, 4])
    for other in (chain_key("m", "", b"tenant-b"), chain_key("m", "x", b"tenant-a")):
        assert cache.match(chain(other, [1, 2, 3, 4], SIZE)) == []


def test_same_content_computed_twice_is_kept_once():
    """The second sequence takes over the block that is held and frees its own."""
    cache = PrefixCache(8, Listener())
    hashes = chain(chain_key("m"), [1, 2, 3, 4], SIZE)
    tables = [[cache.pool.allocate() for _ in hashes] for _ in range(2)]
    cache.register(tables[0], 0, hashes)
    cache.register(tables[1], 0, hashes)
    assert tables[0] == tables[1]
    assert cache.pool.num_used == 2
    for table in tables:
        release(cache, table)
    cache.check()
    assert cache.pool.num_used == 0


def test_clear_needs_an_idle_cache():
    """What a sequence holds cannot be forgotten under it."""
    listener = Listener()
    cache = PrefixCache(4, listener)
    table = hold(cache, chain_key("m"), [1, 2])
    with pytest.raises(ValueError, match="nothing runs"):
        cache.clear()
    release(cache, table)
    cache.clear()
    assert (len(cache), listener.held) == (0, {})
    cache.check()


class CacheMachine(RuleBasedStateMachine):
    """Sequences come and go in a small pool; the books stay right."""

    def __init__(self) -> None:
        super().__init__()
        self.listener = Listener()
        self.cache = PrefixCache(6, self.listener)
        self.live: list[list[int]] = []
        # Oracle: content of each block, as the last writer left it.
        self.content: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self.parents: dict[bytes, bytes] = {}

    @rule(tenant=st.sampled_from([b"a", b"b"]), tokens=st.lists(st.integers(0, 1), max_size=8))
    def start(self, tenant, tokens):
        key = chain_key("m", "", tenant)
        hashes = chain(key, tokens, SIZE)
        for parent, child in itertools.pairwise(hashes):
            self.parents[child] = parent
        for idx, block_id in enumerate(self.cache.match(hashes)):
            assert self.content[block_id] == (tenant, tuple(tokens[: (idx + 1) * SIZE]))
        try:
            table = hold(self.cache, key, tokens)
        except OutOfBlocks:
            return
        for idx, block_id in enumerate(table):
            self.content[block_id] = (tenant, tuple(tokens[: (idx + 1) * SIZE]))
        self.live.append(table)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data):
        idx = data.draw(st.integers(0, len(self.live) - 1))
        release(self.cache, self.live.pop(idx))

    @invariant()
    def books_are_right(self):
        self.cache.check()
        held = [block_id for table in self.live for block_id in table]
        assert self.cache.pool.num_used == len(set(held))
        for block_id in set(held):
            assert self.cache.pool.num_references(block_id) == held.count(block_id)

    @invariant()
    def listener_knows_what_is_held(self):
        assert len(self.listener.held) == len(self.cache)
        for block_hash in self.listener.held:
            assert self.cache.match([block_hash])

    @invariant()
    def a_named_block_never_outlives_its_parent(self):
        for block_hash in self.listener.held:
            parent = self.parents.get(block_hash)
            assert parent is None or parent in self.listener.held

    def teardown(self):
        for table in self.live:
            release(self.cache, table)
        assert self.cache.pool.num_used == 0


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
