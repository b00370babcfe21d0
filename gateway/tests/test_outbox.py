"""Tests of the gateway's outbox: durability, recovery, limits."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from headrace_common.clock import SystemClock
from headrace_common.errors import Unavailable
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent
from headrace_gateway.outbox import SPACING_S, Outbox
from headrace_gateway.outbox_metrics import OutboxMetrics
from headrace_gateway.outbox_place import OutboxInUseError
from headrace_gateway.segments import Position, list_segments, segment_path
from headrace_testing.waiting import eventually

WRITER = Path(__file__).with_name("outbox_writer.py")


def event(number: int, kind: UsageEvent.Kind.ValueType = UsageEvent.KIND_CLOSED) -> UsageEvent:
    return UsageEvent(kind=kind, request_id=f"req_{number}", tenant_id="acme")


@asynccontextmanager
async def running(folder: Path, **limits: float) -> AsyncIterator[Outbox]:
    outbox = Outbox(folder, SystemClock(), OutboxMetrics(CollectorRegistry()), **limits)
    outbox.orphans = await outbox.start()
    try:
        yield outbox
    finally:
        await outbox.close()


async def read_all(outbox: Outbox) -> list[UsageEvent]:
    events, position = [], Position(0, 0)
    while True:
        batch = await outbox.read(position, 7)
        if not batch.payloads:
            return events
        events += map(UsageEvent.FromString, batch.payloads)
        position = batch.end


async def test_a_durable_event_is_read_back_with_id_and_sequence_number(tmp_path: Path) -> None:
    """Events come back in order, stamped with where they were written."""
    async with running(tmp_path) as outbox:
        outbox.append(event(1, UsageEvent.KIND_OPENED))
        await outbox.append_hurried(event(2))
        events = await read_all(outbox)
        assert [(e.request_id, e.outbox_seq) for e in events] == [("req_1", 1), ("req_2", 2)]
        assert {e.outbox_id for e in events} == {outbox.outbox_id}
        assert outbox.durable_seq == 2


async def test_an_event_that_nobody_waits_for_becomes_durable_too(tmp_path: Path) -> None:
    """Opened events are not waited for; they must not wait for others for ever."""
    async with running(tmp_path) as outbox:
        outbox.append(event(1))
        async with asyncio.timeout(30):
            await outbox.grown.wait()
        assert outbox.durable_seq == 1


async def test_commits_of_many_are_spaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs the same whatever it holds; waiting a little makes the groups larger."""
    real_sync, num_syncs = os.fdatasync, 0

    def sync(fd: int) -> None:
        nonlocal num_syncs
        num_syncs += 1
        real_sync(fd)

    async with running(tmp_path) as outbox:
        monkeypatch.setattr(os, "fdatasync", sync)
        loop = asyncio.get_running_loop()
        began_s = loop.time()

        async def write(first: int) -> None:
            for number in range(10):
                await outbox.append_hurried(event(first + number))

        await asyncio.gather(*(write(10 * it) for it in range(16)))
        assert outbox.durable_seq == 160
        assert num_syncs <= (loop.time() - began_s) / SPACING_S + 2


async def test_who_waits_alone_is_not_made_to_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nobody to share a commit with."""
    monkeypatch.setattr("headrace_gateway.outbox.SPACING_S", 60)
    async with running(tmp_path) as outbox, asyncio.timeout(20):
        for number in range(5):
            outbox.append(event(number))
            await outbox.append_hurried(event(number))


async def test_acknowledged_events_survive_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only synced bytes are there after a power cut: all acknowledged events are among them."""
    synced: dict[str, int] = {}
    real_sync = os.fdatasync

    def sync(fd: int) -> None:
        real_sync(fd)
        synced[os.readlink(f"/proc/self/fd/{fd}")] = os.fstat(fd).st_size

    monkeypatch.setattr(os, "fdatasync", sync)
    acknowledged: list[str] = []
    async with running(tmp_path, segment_bytes=2000) as outbox:

        async def write(number: int) -> None:
            await outbox.append_hurried(event(number))
            acknowledged.append(f"req_{number}")

        writes = [asyncio.create_task(write(number)) for number in range(150)]
        await eventually(lambda: len(acknowledged) >= 20, every_s=0)
        at_the_cut, sizes = list(acknowledged), dict(synced)
        await asyncio.gather(*writes)
    for segment in list_segments(tmp_path):
        path = segment_path(tmp_path, segment)
        os.truncate(path, min(sizes.get(str(path), 0), path.stat().st_size))
    async with running(tmp_path) as outbox:
        assert set(at_the_cut) <= {e.request_id for e in await read_all(outbox)}


def test_kill_9_at_any_moment_loses_no_synced_event(tmp_path: Path) -> None:
    """Whatever the writer said was durable is read back; nothing is read that was not written."""
    acknowledged: set[int] = set()
    first, seed = 0, random.Random(20261129)
    for _ in range(4):
        writer = subprocess.Popen(
            [sys.executable, str(WRITER), str(tmp_path), str(first)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        lines = [writer.stdout.readline()]
        # Killed behind a random number of acknowledgements, while others are being written.
        lines += [writer.stdout.readline() for _ in range(seed.randrange(0, 400))]
        writer.kill()
        lines += writer.stdout.read().splitlines()
        writer.wait()
        writer.stdout.close()
        assert writer.returncode == -signal.SIGKILL
        acknowledged |= {int(line) for line in lines if line.strip()}
        first = max(acknowledged) + 100

    async def check() -> None:
        async with running(tmp_path) as outbox:
            events = await read_all(outbox)
        numbers = [int(e.request_id.removeprefix("req_")) for e in events]
        assert acknowledged <= set(numbers)
        assert len(numbers) == len(set(numbers))
        assert all(e.model == "m" * (n % 300) for e, n in zip(events, numbers, strict=True))
        seqs = [e.outbox_seq for e in events]
        assert seqs == sorted(set(seqs))
        assert len({e.outbox_id for e in events}) == 1

    asyncio.run(check())


async def test_a_torn_last_frame_is_cut_and_counted_and_the_rest_is_kept(tmp_path: Path) -> None:
    """A crash in the middle of a write costs only what nobody was told of."""
    async with running(tmp_path) as outbox:
        await outbox.append_hurried(event(1))
        await outbox.append_hurried(event(2))
    (newest,) = list_segments(tmp_path)
    path = segment_path(tmp_path, newest)
    os.truncate(path, path.stat().st_size - 3)
    registry = CollectorRegistry()
    outbox = Outbox(tmp_path, SystemClock(), OutboxMetrics(registry))
    await outbox.start()
    await outbox.append_hurried(event(3))
    events = await read_all(outbox)
    await outbox.close()
    assert [e.request_id for e in events] == ["req_1", "req_3"]
    assert registry.get_sample_value("headrace_gateway_outbox_torn_bytes_total") > 0


async def test_sequence_numbers_go_on_after_a_restart_even_when_all_was_deleted(
    tmp_path: Path,
) -> None:
    """A number is never used for two durable events."""
    async with running(tmp_path, segment_age_s=0.01) as outbox:
        await outbox.append_hurried(event(1))
        await asyncio.sleep(0.05)
        await outbox.append_hurried(event(2))
        for segment in outbox.finished_segments():
            await outbox.delete(segment)
        outbox_id = outbox.outbox_id
    async with running(tmp_path) as outbox:
        for segment in outbox.finished_segments():
            await outbox.delete(segment)
    async with running(tmp_path) as outbox:
        await outbox.append_hurried(event(3))
        (last,) = await read_all(outbox)
        assert (last.outbox_seq, last.outbox_id) == (3, outbox_id)


async def test_segments_turn_by_size_and_the_newest_is_never_finished(tmp_path: Path) -> None:
    """Finished segments can be deleted; what is written to cannot."""
    async with running(tmp_path, segment_bytes=100) as outbox:
        for number in range(10):
            await outbox.append_hurried(event(number))
        finished = outbox.finished_segments()
        assert len(finished) >= 3
        assert max(list_segments(tmp_path)) not in finished
        with pytest.raises(ValueError, match="not finished"):
            await outbox.delete(max(list_segments(tmp_path)))
        assert len(await read_all(outbox)) == 10


async def test_a_quiet_segment_is_finished_by_its_age(tmp_path: Path) -> None:
    """The last events of a busy hour can be confirmed without waiting for the next request."""
    async with running(tmp_path, segment_age_s=0.02) as outbox:
        await outbox.append_hurried(event(1))
        await eventually(outbox.finished_segments)


async def test_returns_opened_requests_without_a_close(tmp_path: Path) -> None:
    """After a restart exactly the requests of the dead process that never ended are known."""
    async with running(tmp_path) as outbox:
        for number in (1, 2, 3):
            outbox.append(event(number, UsageEvent.KIND_OPENED))
        await outbox.append_hurried(event(2))
    async with running(tmp_path) as outbox:
        assert [e.request_id for e in outbox.orphans] == ["req_1", "req_3"]


async def test_a_second_gateway_on_the_folder_is_refused(tmp_path: Path) -> None:
    """Two writers would mix their sequence numbers; the message says what to do."""
    async with running(tmp_path) as outbox:
        second = Outbox(tmp_path, SystemClock(), OutboxMetrics(CollectorRegistry()))
        with pytest.raises(OutboxInUseError, match="own folder"):
            await second.start()
        await outbox.append_hurried(event(1))
    async with running(tmp_path) as outbox:
        assert len(await read_all(outbox)) == 1


async def test_is_full_above_its_cap_and_not_after_a_deletion(tmp_path: Path) -> None:
    """The cap stops admission; events of running requests are still taken."""
    async with running(tmp_path, max_bytes=300, segment_bytes=100) as outbox:
        number = 0
        assert outbox._metrics.limit_bytes._value.get() == 300
        while not outbox.is_full:
            await outbox.append_hurried(event(number))
            number += 1
        await outbox.append_hurried(event(number))
        for segment in outbox.finished_segments():
            await outbox.delete(segment)
        assert not outbox.is_full


@contextmanager
def _files_of_at_most(size_bytes: int) -> Iterator[None]:
    # The kernel refuses, after a partial write, exactly as a full disk does (EFBIG for ENOSPC).
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_full_disk_refuses_work_and_nothing_is_lost_when_it_ends(tmp_path: Path) -> None:
    """Unavailable at once and `is_full`; the event is kept and written when there is space."""
    registry = CollectorRegistry()
    outbox = Outbox(tmp_path, SystemClock(), OutboxMetrics(registry))
    await outbox.start()
    await outbox.append_hurried(event(1))
    with _files_of_at_most(70):
        for number in (2, 3):
            with pytest.raises(Unavailable):
                await outbox.append_hurried(event(number))
        assert outbox.is_full
    await eventually(lambda: not outbox.is_full)
    await outbox.append_hurried(event(4))
    events = await read_all(outbox)
    await outbox.close()
    assert [e.request_id for e in events] == ["req_1", "req_2", "req_3", "req_4"]
    assert registry.get_sample_value("headrace_gateway_outbox_write_failures_total") >= 1
    async with running(tmp_path) as outbox:
        assert len(await read_all(outbox)) == 4


async def test_close_writes_what_is_queued(tmp_path: Path) -> None:
    """A drained gateway leaves no event in memory."""
    async with running(tmp_path) as outbox:
        for number in range(2000):
            outbox.append(event(number))
    async with running(tmp_path) as outbox:
        assert len(await read_all(outbox)) == 2000
