"""Block events: numbered without gaps, replayable, and equal to the snapshot."""

from headrace_worker.engine.block_events import Batch, BlockEventLog, Cleared, Removed, Stored
from headrace_worker.engine.prefix_cache import PrefixCache


def test_numbers_grow_by_one_and_quiet_steps_have_none():
    """A step without change makes no batch."""
    log = BlockEventLog()
    assert log.flush() is None
    log.stored([b"a"])
    log.stored([b"b"])
    assert log.flush() == Batch(1, (Stored((b"a",)), Stored((b"b",))))
    log.removed(b"a")
    log.removed(b"b")
    assert log.flush() == Batch(2, (Removed((b"a", b"b")),))
    assert log.last_seq == 2


def test_replays_what_is_kept_and_says_when_it_is_not():
    """Older batches than those kept lead to None: take a snapshot."""
    log = BlockEventLog(num_kept=2)
    for name in (b"a", b"b", b"c"):
        log.stored([name])
        log.flush()
    assert log.since(1) is None
    assert [batch.seq for batch in log.since(2) or []] == [2, 3]
    assert log.since(4) == []


def test_snapshot_equals_the_sum_of_all_batches():
    """Whoever applies every batch holds what the snapshot says."""
    log = BlockEventLog()
    log.stored([b"a", b"b"])
    log.flush()
    log.removed(b"b")
    log.stored([b"c"])
    log.flush()
    assert log.snapshot() == (2, [b"a", b"c"])


def test_clearing_drops_what_came_before_in_the_same_step():
    """Earlier changes of the step need not be told."""
    log = BlockEventLog()
    log.stored([b"a"])
    log.cleared()
    log.stored([b"b"])
    assert log.flush() == Batch(1, (Cleared(), Stored((b"b",))))
    assert log.snapshot() == (1, [b"b"])


def test_tells_the_subscriber_after_each_batch():
    """The publisher learns of new batches without polling."""
    log, seen = BlockEventLog(), []
    log.subscribe(lambda: seen.append(log.last_seq))
    log.stored([b"a"])
    log.flush()
    log.flush()
    assert seen == [1]


def test_of_long_chains_every_nth_block_is_told():
    """Removed blocks that nobody was told of are not told either."""
    log = BlockEventLog(index_stride=4)
    cache = PrefixCache(16, log)
    names = [bytes([number]) for number in range(1, 11)]
    table = [cache.pool.allocate() for _ in names]
    cache.register(table, 0, names[:3])
    cache.register(table, 3, names[3:])
    log.flush()
    assert log.snapshot()[1] == [names[3], names[7]]
    for block_id in table:
        cache.pool.release(block_id)
    for _ in range(16):
        cache.pool.allocate()
    batch = log.flush()
    assert batch is not None
    (event,) = batch.events
    assert isinstance(event, Removed)
    assert set(event.block_hashes) == {names[3], names[7]}
    assert log.snapshot()[1] == []
