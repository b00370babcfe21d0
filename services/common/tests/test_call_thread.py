"""Tests of the thread that makes calls for a loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headrace_common.call_thread import CallThread
from headrace_testing.waiting import eventually


async def test_calls_are_made_in_order_on_one_thread_of_its_own() -> None:
    """What they share needs no lock."""
    thread, made = CallThread("calls"), []

    def call(number: int) -> str:
        made.append(number)
        return threading.current_thread().name

    names = await asyncio.gather(*(thread.run(lambda n=n: call(n)) for n in range(20)))
    assert made == list(range(20))
    assert set(names) == {"calls"}
    thread.close()
    assert "calls" not in {it.name for it in threading.enumerate()}


async def test_what_a_call_raises_is_raised_where_it_was_asked_for() -> None:
    """And the thread goes on."""
    thread = CallThread("calls")
    with pytest.raises(OSError, match="disk"):
        await thread.run(lambda: (_ for _ in ()).throw(OSError("disk")))
    assert await thread.run(lambda: 7) == 7
    thread.close()


async def test_a_call_is_made_though_nobody_waits_any_more() -> None:
    """A write under way is always finished."""
    thread, gate, made = CallThread("calls"), threading.Event(), []
    first = asyncio.create_task(thread.run(gate.wait))
    second = asyncio.create_task(thread.run(lambda: made.append(1)))
    await asyncio.sleep(0.01)
    for task in (first, second):
        task.cancel()
    await asyncio.wait((first, second))
    gate.set()
    await eventually(lambda: made == [1])
    thread.close()


async def test_a_thread_that_never_worked_closes_too() -> None:
    """An outbox whose folder is taken never writes."""
    CallThread("calls").close()
