"""What must hold between two steps, checked from outside after each one in debug mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from headrace_worker.engine.prefix_cache import PrefixCache
from headrace_worker.engine.request import Request, Sequence, SequenceState
from headrace_worker.engine.scheduler import Scheduler, SchedulerLimits


class BrokenInvariant(Exception):  # noqa: N818 - says what it is
    """The engine's books contradict one another."""


def check_books(
    scheduler: Scheduler, cache: PrefixCache, limits: SchedulerLimits, live: Iterable[Request]
) -> None:
    """Compare queues, sequences, blocks and names. Takes time in proportion to the pool.

    Raises:
        BrokenInvariant: something does not hold; the text says what.
    """
    try:
        cache.check()
    except ValueError as error:
        raise BrokenInvariant(str(error)) from error
    running, waiting = scheduler.running, scheduler.waiting
    held = Counter(block_id for seq in running for block_id in seq.block_table)
    held.update(block_id for holder in cache.holders for block_id in holder.block_table)
    pool = cache.pool
    _require(pool.num_used == len(held), "a block is used by nobody, or held without being used")
    for block_id, number in held.items():
        _require(pool.num_references(block_id) == number, "a block's references are miscounted")
    _require(len(running) <= limits.max_running, "too many run")
    _require(waiting == sorted(waiting, key=lambda seq: seq.request.rank), "the queue is unordered")
    _check_unshared_tails(running, limits.block_size)
    _check_places([seq for request in live for seq in request.sequences], running, waiting)


def _check_unshared_tails(running: list[Sequence], block_size: int) -> None:
    """No two sequences may write to the same block."""
    tails = [
        block_id
        for seq in running
        for block_id in seq.block_table[seq.num_computed // block_size :]
    ]
    _require(len(tails) == len(set(tails)), "a block that is not full is shared")
    for seq in running:
        _require(
            len(seq.block_table) * block_size >= seq.num_computed, "computed tokens have no block"
        )


def _check_places(
    all_live: list[Sequence], running: list[Sequence], waiting: list[Sequence]
) -> None:
    """Each sequence is where its state says, once, and holds blocks only while it runs."""
    places = Counter(map(id, [*running, *waiting]))
    for seq in all_live:
        is_queued = seq.state in (SequenceState.WAITING, SequenceState.PREEMPTED)
        is_running = seq.state is SequenceState.RUNNING
        _require(places.pop(id(seq), 0) == (is_queued or is_running), "a sequence is misplaced")
        _require(is_running or not seq.block_table, "a sequence holds blocks without running")
    _require(not places, "something is queued that the engine does not know")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BrokenInvariant(otherwise)
