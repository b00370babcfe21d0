"""The debug mode's checks see each kind of broken book; sound ones pass (see test_engine too)."""

import pytest

from headrace_common.blocks import chain_key
from headrace_worker.engine.block_events import BlockEventLog
from headrace_worker.engine.invariants import BrokenInvariant, check_books
from headrace_worker.engine.prefix_cache import PrefixCache
from headrace_worker.engine.request import Request, SamplingParams, SequenceState, StopParams
from headrace_worker.engine.scheduler import Scheduler, SchedulerLimits

LIMITS = SchedulerLimits(16, 4, 8, 100, block_size=4)


def request(key: int, num_tokens: int = 6) -> Request:
    return Request(
        key=key,
        request_id=f"r{key}",
        prompt_token_ids=[key] * num_tokens,
        sampling=SamplingParams(),
        stopping=StopParams(),
        seed=0,
        chain_key=chain_key("m"),
    )


def lose_a_block(scheduler, _cache):
    scheduler.running[0].block_table.pop()


def count_twice(scheduler, cache):
    cache.pool.share(scheduler.running[0].block_table[0])


def share_a_tail(scheduler, cache):
    one, two = scheduler.running
    cache.pool.release(two.block_table[-1])
    cache.pool.share(one.block_table[-1])
    two.block_table[-1] = one.block_table[-1]


def forget_a_state(scheduler, _cache):
    scheduler.running[0].state = SequenceState.FINISHED


def hold_while_waiting(scheduler, cache):
    waiting = scheduler.waiting[0]
    waiting.block_table = [cache.pool.allocate()]


def reorder(scheduler, _cache):
    scheduler._waiting.reverse()


@pytest.mark.parametrize(
    "breaks",
    [lose_a_block, count_twice, share_a_tail, forget_a_state, hold_while_waiting, reorder],
)
def test_sees_what_is_broken(breaks):
    """Sound before, told after."""
    cache = PrefixCache(6, BlockEventLog())
    scheduler = Scheduler(LIMITS, cache)
    live = [request(key) for key in range(1, 5)]
    for it in live[:2]:
        scheduler.add(it)
    for chunk in scheduler.plan(0.0).chunks:
        scheduler.computed(chunk)
    for it in live[2:]:
        scheduler.add(it)
    if breaks is hold_while_waiting:
        scheduler.abort(live[0])
    check_books(scheduler, cache, LIMITS, live)
    breaks(scheduler, cache)
    with pytest.raises(BrokenInvariant):
        check_books(scheduler, cache, LIMITS, live)


def test_sees_who_is_queued_without_being_known():
    """A sequence that no live request owns would run for nobody."""
    cache = PrefixCache(6, BlockEventLog())
    scheduler = Scheduler(LIMITS, cache)
    scheduler.add(request(1))
    with pytest.raises(BrokenInvariant, match="does not know"):
        check_books(scheduler, cache, LIMITS, [])
