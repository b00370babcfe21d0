"""What a watcher of a worker's load is told, and when."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import count

from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_worker.load_watch import ChangeSignal, load_reports


def reports(signal: ChangeSignal, interval_ms: int = 0):
    numbers = count(1)
    return load_reports(
        pb.WatchLoadRequest(interval_ms=interval_ms),
        signal,
        lambda: pb.LoadReport(num_running=next(numbers)),
    )


async def test_a_report_comes_at_once_and_at_least_every_interval() -> None:
    """Nothing need change."""
    told = reports(ChangeSignal(), interval_ms=10)
    async with asyncio.timeout(30):
        assert [(await anext(told)).num_running for _ in range(3)] == [1, 2, 3]
    await told.aclose()


async def test_a_change_while_a_report_is_sent_is_not_missed() -> None:
    """The next report does not wait for the interval."""
    signal = ChangeSignal()
    told = reports(signal, interval_ms=60_000)
    await anext(told)
    signal.notify()
    async with asyncio.timeout(30):
        assert (await anext(told)).num_running == 2
    await told.aclose()


async def test_many_changes_share_a_report() -> None:
    """A worker with a thousand changes a second does not spend its time on telling of them."""
    signal, last = ChangeSignal(), deque([0], maxlen=1)

    async def watch() -> None:
        async for report in reports(signal, interval_ms=60_000):
            last.append(report.num_running)

    watcher = asyncio.create_task(watch())
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    for _ in range(200):
        signal.notify()
        await asyncio.sleep(0)
    while loop.time() < began_s + 0.1:
        signal.notify()
        await asyncio.sleep(0.001)
    took_s = loop.time() - began_s
    watcher.cancel()
    assert 2 <= last[0] <= 2 + took_s / 0.02
