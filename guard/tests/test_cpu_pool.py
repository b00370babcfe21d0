"""Threads for long texts: bounded, and a caller that leaves frees its place when work ends."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Gauge

from headrace_common.fair_places import NoPlaceError
from headrace_guard.cpu_pool import CpuPool
from headrace_testing.waiting import eventually


@pytest.fixture
def gauge() -> Gauge:
    return Gauge("waiting", "Texts here.", registry=CollectorRegistry())


@pytest.fixture
def pool(gauge: Gauge) -> Iterator[CpuPool]:
    made = CpuPool(1, 1, gauge)
    yield made
    made.close()


async def test_returns_what_the_work_returns(pool: CpuPool) -> None:
    """And raises what it raises."""
    assert await pool.run("t", 1, lambda: threading.current_thread().name) != "MainThread"
    with pytest.raises(ZeroDivisionError):
        await pool.run("t", 1, lambda: 1 // 0)


async def test_refuses_when_the_queue_is_full(pool: CpuPool, gauge: Gauge) -> None:
    """One runs, one waits, the third is told at once."""
    release = threading.Event()
    running = [asyncio.create_task(pool.run("t", 1, release.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(NoPlaceError):
        await pool.run("t", 1, lambda: None)
    release.set()
    await asyncio.gather(*running)
    await eventually(lambda: gauge.collect()[0].samples[0].value == 0)
    assert await pool.run("t", 1, lambda: 7) == 7


async def test_a_caller_that_leaves_frees_its_place_when_the_work_ends(pool: CpuPool) -> None:
    """Not before: the thread is still busy."""
    release = threading.Event()
    leaving = asyncio.create_task(pool.run("t", 1, release.wait))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    release.set()
    assert await eventually(lambda: pool.run("t", 1, lambda: True))


async def test_short_texts_are_judged_by_turns_of_tenants(pool: CpuPool) -> None:
    """Another's comes after the one that is judged, not after all that came before it."""
    judged: list[str] = []

    async def judge(whose: str) -> None:
        await pool.run_long(whose, 100, lambda: judged.append(whose))

    async with asyncio.TaskGroup() as group:
        for whose in [*["flood"] * 9, "other"]:
            group.create_task(judge(whose))
    assert judged == ["flood", "other", *["flood"] * 8]
