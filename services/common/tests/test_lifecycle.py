from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from headrace_common.lifecycle import (
    Lifecycle,
    cancel_and_wait,
    raise_if_cancelled,
    supervise,
)
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


def test_a_service_keeps_the_collector_off_what_was_there_at_its_start() -> None:
    """In a process of its own: tuning is for good."""
    code = (
        "import gc\n"
        "from headrace_common.lifecycle import run\n"
        "async def main(): print(gc.get_freeze_count(), gc.get_threshold()[0])\n"
        "run(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    num_frozen, threshold = map(int, done.stdout.split())
    assert num_frozen > 1000
    assert threshold >= 10_000


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


async def test_waiting_for_others_to_end_does_not_hide_ones_own_cancellation() -> None:
    """A loop that is cancelled while it cleans up ends; it does not start its next turn."""

    async def slow_to_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.1)

    async def body() -> None:
        inner = asyncio.create_task(slow_to_end())
        await asyncio.sleep(0)
        await cancel_and_wait(inner)

    loop = asyncio.create_task(supervise("loop", body))
    await asyncio.sleep(0.02)
    loop.cancel()
    done, _ = await asyncio.wait([loop], timeout=2)
    loop.cancel()
    assert done == {loop}
    assert loop.cancelled()


async def test_exceptions_of_those_waited_for_are_dropped() -> None:
    """How a cancelled task ends is nobody's concern; None and finished tasks are allowed."""

    async def fails_at_the_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("while ending")

    failing = asyncio.create_task(fails_at_the_end())
    finished = asyncio.create_task(asyncio.sleep(0))
    await asyncio.sleep(0.01)
    await cancel_and_wait(failing, None, finished)
    assert failing.done()
    await cancel_and_wait()


async def test_a_swallowed_cancellation_can_be_raised_again() -> None:
    """A loop around a library that loses cancellations ends; one not asked goes on."""
    turns = 0

    async def loses_cancellations() -> None:
        nonlocal turns
        turns += 1
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            return

    async def loop() -> None:
        while True:
            await loses_cancellations()
            raise_if_cancelled()

    task = asyncio.create_task(loop())
    await eventually(lambda: turns >= 3)
    task.cancel()
    await asyncio.wait({task}, timeout=2)
    assert task.cancelled()


async def test_a_supervised_loop_ends_though_its_body_made_an_error_of_it() -> None:
    """Otherwise a dependency that is down would keep it alive for ever."""
    started = asyncio.Event()

    async def body() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ConnectionError("lost on the way") from None

    task = asyncio.create_task(supervise("loop", body, first_delay_s=0.01))
    await started.wait()
    task.cancel()
    await asyncio.wait({task}, timeout=2)
    assert task.cancelled()
