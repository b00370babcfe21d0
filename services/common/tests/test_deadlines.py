"""Tests of deadlines that share timers."""

from __future__ import annotations

import asyncio

import pytest

from headrace_common.deadlines import Deadlines


async def test_each_rings_once_in_order_and_never_early() -> None:
    """Waits of different lengths share a timer, not a time."""
    loop, rung = asyncio.get_running_loop(), []
    deadlines, began_s = Deadlines(loop), loop.time()
    for delay_s in (0.06, 0.02, 0.04):
        deadlines.add(delay_s, lambda delay_s=delay_s: rung.append((delay_s, loop.time())))
    await asyncio.sleep(0.3)
    assert [delay_s for delay_s, _ in rung] == [0.02, 0.04, 0.06]
    assert all(rung_s - began_s >= delay_s - 0.002 for delay_s, rung_s in rung)


async def test_what_is_discarded_does_not_ring() -> None:
    """Nearly all waits end so."""
    rung: list[str] = []
    deadlines = Deadlines(asyncio.get_running_loop())

    def stays() -> None:
        rung.append("stays")

    def goes() -> None:
        rung.append("goes")

    deadlines.add(0.01, goes).discard(goes)
    deadlines.add(0.01, stays)
    deadlines.add(0.03, goes).discard(goes)
    await asyncio.sleep(0.1)
    assert rung == ["stays"]


async def test_a_callback_may_discard_others_and_add_anew() -> None:
    """A call that runs out cancels, which discards; a stalled one waits again."""
    rung: list[str] = []
    deadlines = Deadlines(asyncio.get_running_loop())

    def again() -> None:
        rung.append("again")

    def first() -> None:
        rung.append("first")
        waits.discard(second)
        deadlines.add(0.01, again)

    def second() -> None:
        rung.append("second")
        waits.discard(first)
        deadlines.add(0.01, again)

    waits = deadlines.add(0.01, first)
    waits.add(second)
    await asyncio.sleep(0.1)
    assert len(rung) == 2
    assert rung[1] == "again"


async def test_a_callback_that_fails_takes_no_other_with_it() -> None:
    """The rest of its set, and later ones, still ring."""
    loop, rung, failures = asyncio.get_running_loop(), [], []
    loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
    deadlines = Deadlines(loop)

    def fails() -> None:
        raise ZeroDivisionError

    for number in range(3):
        deadlines.add(0.01, lambda number=number: rung.append(number))
    deadlines.add(0.01, fails)
    deadlines.add(0.05, lambda: rung.append(9))
    await asyncio.sleep(0.2)
    assert sorted(rung) == [0, 1, 2, 9]
    assert len(failures) == 1


@pytest.mark.parametrize("delay_s", [0.01, 2.0])
async def test_closed_deadlines_ring_no_more(delay_s: float) -> None:
    """Their connection is gone, and its calls were told."""
    rung: list[int] = []
    deadlines = Deadlines(asyncio.get_running_loop())
    deadlines.add(delay_s, lambda: rung.append(1))
    deadlines.close()
    await asyncio.sleep(0.05)
    assert rung == []
