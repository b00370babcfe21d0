"""Time without the spans in which the process stood still."""

from __future__ import annotations

import asyncio
import time

import pytest

from headrace_common.awake import MOST_BETWEEN_LOOKS_S, AwakeClock, awake_timeout
from headrace_testing.clock import FakeClock


def test_a_leap_counts_for_one_look() -> None:
    """Ordinary looks add up, a suspended hour is a second at most."""
    clock = FakeClock()
    awake = AwakeClock(clock)
    for _ in range(10):
        clock.advance(0.5)
        awake.now_s()
    assert awake.now_s() == pytest.approx(5.0)
    clock.advance(3600)
    assert awake.now_s() == pytest.approx(5.0 + MOST_BETWEEN_LOOKS_S)


async def test_a_wait_in_which_the_loop_stood_still_begins_anew() -> None:
    """What came meanwhile is there, and has not been read."""
    came = asyncio.Event()
    async with awake_timeout(0.2):
        asyncio.get_running_loop().call_later(0.3, came.set)
        await asyncio.sleep(0)
        time.sleep(0.4)  # noqa: ASYNC251 - that the loop stands still is the point
        await came.wait()


async def test_a_wait_of_a_process_that_runs_ends() -> None:
    """Also if the loop stands still again and again."""
    with pytest.raises(TimeoutError):
        async with awake_timeout(0.05):
            await asyncio.Event().wait()
    stutters = asyncio.create_task(_stutter())
    with pytest.raises(TimeoutError):
        async with awake_timeout(0.05):
            await stutters


async def _stutter() -> None:
    while True:
        await asyncio.sleep(0)
        time.sleep(0.15)  # noqa: ASYNC251 - as above


async def test_a_wait_without_a_bound_and_one_that_ends_in_time_leave_nothing() -> None:
    """Neither is cut afterwards."""
    async with awake_timeout(None):
        await asyncio.sleep(0)
    async with awake_timeout(0.05):
        await asyncio.sleep(0)
    await asyncio.sleep(0.1)
