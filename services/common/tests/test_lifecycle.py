from __future__ import annotations

import asyncio
import os
import signal

import pytest

from headrace_common.lifecycle import Lifecycle, cancel_and_wait, supervise
from headrace_testing.waiting import eventually


async def test_sigterm_makes_a_ready_process_stop() -> None:
    life = Lifecycle()
    life.install_signals()
    life.set_ready(True)
    assert life.is_ready
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(life.stopping.wait(), 2)
    assert not life.is_ready
    loop = asyncio.get_running_loop()
    loop.remove_signal_handler(signal.SIGTERM)
    loop.remove_signal_handler(signal.SIGINT)


async def test_a_supervised_loop_goes_on_after_failures_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runs = failures = 0

    async def body() -> None:
        nonlocal runs
        runs += 1
        raise OSError("no route")

    def failed() -> None:
        nonlocal failures
        failures += 1

    task = asyncio.create_task(supervise("pump", body, first_delay_s=0.001, on_failure=failed))
    await eventually(lambda: runs >= 4)
    await cancel_and_wait(task)
    assert failures >= 4
    assert caplog.text.count("no route") == 1


async def test_a_cancelled_error_that_is_not_the_loops_own_does_not_end_it() -> None:
    """Some libraries let the CancelledError of an inner task out."""
    runs = 0

    async def body() -> None:
        nonlocal runs
        runs += 1
        raise asyncio.CancelledError

    task = asyncio.create_task(supervise("pump", body, first_delay_s=0.001))
    await eventually(lambda: runs >= 2)
    task.cancel()
    await asyncio.wait({task}, timeout=2)
    assert task.cancelled()


async def test_cancelling_waits_for_the_clean_up() -> None:
    cleaned = False

    async def slow_to_leave() -> None:
        nonlocal cleaned
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            cleaned = True

    task = asyncio.create_task(slow_to_leave())
    await asyncio.sleep(0)
    await cancel_and_wait(task, None)
    assert cleaned
