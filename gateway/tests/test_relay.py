"""Tests of the relay from the outbox to the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from headrace_common.clock import SystemClock
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent
from headrace_gateway.outbox import Outbox
from headrace_gateway.outbox_metrics import OutboxMetrics
from headrace_gateway.relay import GATHER_S, Identity, Relay
from headrace_gateway.segments import list_segments
from headrace_testing.waiting import eventually


@dataclass
class Broker:
    """A sink with switches; `books` is what a consumer has booked of it."""

    is_down: bool = False
    # Acknowledges, then forgets: a memory broker that restarts.
    forgets: bool = False
    received: list[str] = field(default_factory=list)
    books: set[Identity] = field(default_factory=set)
    connections_closed: int = 0
    num_batches: int = 0

    async def send(self, events: list[UsageEvent]) -> None:
        await asyncio.sleep(0)
        self.num_batches += 1
        if self.is_down:
            raise ConnectionError("broker down")
        self.received += [event.request_id for event in events]
        if not self.forgets:
            self.books |= {(event.request_id, event.kind) for event in events}

    async def stop(self) -> None:
        self.connections_closed += 1

    async def find_missing(self, events: list[UsageEvent]) -> set[Identity]:
        return {(event.request_id, event.kind) for event in events} - self.books

    async def close(self) -> None:
        """Nothing to end."""


@dataclass
class Rig:
    """An outbox and a relay that belong together."""

    outbox: Outbox
    relay: Relay
    registry: CollectorRegistry

    def metric(self, name: str) -> float:
        return self.registry.get_sample_value(f"headrace_gateway_outbox_{name}") or 0.0


@asynccontextmanager
async def rig(
    folder: Path,
    broker: Broker,
    *,
    ledger: Broker | None = None,
    grace_s: float = 0.05,
    confirm_interval_s: float = 0.02,
    is_pinned: Callable[[str], bool] = lambda _request_id: False,
) -> AsyncIterator[Rig]:
    registry = CollectorRegistry()
    metrics = OutboxMetrics(registry)
    outbox = Outbox(folder, SystemClock(), metrics, segment_age_s=0.02)
    await outbox.start()
    relay = Relay(
        outbox,
        broker,
        ledger or broker,
        SystemClock(),
        metrics,
        is_pinned=is_pinned,
        grace_s=grace_s,
        confirm_interval_s=confirm_interval_s,
    )
    await relay.start()
    try:
        yield Rig(outbox, relay, registry)
    finally:
        await relay.close(drain_s=0.05)
        await outbox.close()


async def write(outbox: Outbox, *numbers: int) -> None:
    for number in numbers:
        await outbox.append_hurried(
            UsageEvent(
                kind=UsageEvent.KIND_CLOSED,
                request_id=f"req_{number}",
                tenant_id="acme",
                occurred_unix_us=1,
            )
        )


async def test_events_arrive_in_order_and_booked_segments_are_deleted(tmp_path: Path) -> None:
    """The way of a good day."""
    broker = Broker()
    async with rig(tmp_path, broker) as it:
        await write(it.outbox, *range(30))
        await eventually(lambda: len(broker.received) >= 30)
        await eventually(lambda: it.outbox.size_bytes == 0)
        assert broker.received == [f"req_{n}" for n in range(30)]
        assert len(list_segments(tmp_path)) == 1


async def test_a_broker_that_is_down_blocks_nobody_and_gets_all_when_it_is_back(
    tmp_path: Path,
) -> None:
    """Writing goes on, the backlog is visible, every event arrives."""
    broker = Broker(is_down=True)
    async with rig(tmp_path, broker) as it:
        await write(it.outbox, *range(20))
        await eventually(lambda: it.metric("relay_failures_total") >= 2)
        await eventually(lambda: it.metric("pending_events") == 20)
        assert it.metric("oldest_age_seconds") > 0
        broker.is_down = False
        await eventually(lambda: set(broker.received) == {f"req_{n}" for n in range(20)})
        await eventually(lambda: it.metric("pending_events") == 0)
        assert it.metric("oldest_age_seconds") == 0


async def test_a_position_that_cannot_be_saved_is_no_failure_of_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and the backlog is measured on."""
    monkeypatch.setattr("headrace_gateway.relay._SAVE_EVERY_S", 0.02)
    broker = Broker()
    async with rig(tmp_path, broker) as it:
        (tmp_path / "position").mkdir()
        await write(it.outbox, 1)
        await eventually(lambda: "usage position failed" in caplog.text)
        assert it.metric("relay_failures_total") == 0
        assert broker.received == ["req_1"]


async def test_events_that_the_broker_forgot_are_produced_again(tmp_path: Path) -> None:
    """An acknowledgement is not a booking: only the ledger's word deletes."""
    broker = Broker(forgets=True)
    async with rig(tmp_path, broker) as it:
        await write(it.outbox, 1, 2, 3)
        await eventually(lambda: len(broker.received) == 3)
        broker.forgets = False
        await eventually(lambda: len(broker.books) == 3)
        await eventually(lambda: it.outbox.size_bytes == 0)
        assert it.metric("produced_again_total") >= 3


async def test_a_booking_that_is_only_slow_is_not_produced_again(tmp_path: Path) -> None:
    """Within the grace period a missing event is on its way."""
    broker = Broker(forgets=True)
    async with rig(tmp_path, broker, grace_s=60) as it:
        await write(it.outbox, 1)
        await eventually(lambda: it.outbox.finished_segments())
        await asyncio.sleep(0.1)
        assert broker.received == ["req_1"]
        assert it.metric("produced_again_total") == 0
        broker.books.add(("req_1", UsageEvent.KIND_CLOSED))
        await eventually(lambda: it.outbox.size_bytes == 0)


async def test_events_gather_also_while_they_never_end(tmp_path: Path) -> None:
    """A batch costs about the same whatever it holds, so that load must not make them small."""
    broker = Broker()
    async with rig(tmp_path, broker, grace_s=60) as it:
        began_s = SystemClock().now_s()
        for number in range(40):
            await write(it.outbox, number)
            await asyncio.sleep(0.01)
        elapsed_s = SystemClock().now_s() - began_s
        assert 0 < broker.num_batches <= elapsed_s / GATHER_S + 1
        await eventually(lambda: len(broker.received) == 40)


async def test_a_restart_goes_on_behind_the_last_acknowledged_event(tmp_path: Path) -> None:
    """The saved position spares the broker what it has; a lost one only costs duplicates."""
    broker = Broker(forgets=True)
    async with rig(tmp_path, broker, grace_s=60) as it:
        await write(it.outbox, 1, 2)
        await eventually(lambda: len(broker.received) == 2)
        await eventually((tmp_path / "position").exists)
    async with rig(tmp_path, broker, grace_s=60) as it:
        await write(it.outbox, 3)
        await eventually(lambda: len(broker.received) == 3)
    (tmp_path / "position").write_bytes(b"{ half a")
    async with rig(tmp_path, broker, grace_s=60):
        await eventually(lambda: len(broker.received) == 6)
    assert broker.received == ["req_1", "req_2", "req_3"] * 2


async def test_segments_of_requests_under_way_are_kept(tmp_path: Path) -> None:
    """A restart must find what was open."""
    broker, pinned = Broker(), {"req_1"}
    async with rig(tmp_path, broker, is_pinned=pinned.__contains__) as it:
        await write(it.outbox, 1)
        await eventually(lambda: it.outbox.finished_segments())
        await asyncio.sleep(0.1)
        assert it.outbox.size_bytes > 0
        pinned.clear()
        await eventually(lambda: it.outbox.size_bytes == 0)


async def test_a_stop_leaves_no_segment_that_is_booked(tmp_path: Path) -> None:
    """One that a long request held back may hold beginnings whose ends lay in later ones."""
    broker = Broker()
    async with rig(tmp_path, broker, confirm_interval_s=60) as it:
        await write(it.outbox, 1)
        await eventually(lambda: it.outbox.finished_segments())
        await eventually(lambda: broker.received)
        assert it.outbox.size_bytes > 0
    assert it.outbox.size_bytes == 0


async def test_billing_down_keeps_segments_and_does_not_stop_producing(tmp_path: Path) -> None:
    """Confirmation and production fail apart from each other."""

    class Down(Broker):
        async def find_missing(self, events: list[UsageEvent]) -> set[Identity]:
            raise ConnectionError("billing down")

    broker = Broker()
    async with rig(tmp_path, broker, ledger=Down()) as it:
        await write(it.outbox, 1)
        await eventually(lambda: it.metric("relay_failures_total") >= 1)
        await write(it.outbox, 2)
        await eventually(lambda: broker.received == ["req_1", "req_2"])
        assert it.outbox.size_bytes > 0


@pytest.mark.parametrize("num_events", [0, 5])
async def test_close_hands_over_what_the_broker_takes_at_once(
    tmp_path: Path, num_events: int
) -> None:
    """A stop with a working broker leaves nothing behind, and ends soon without one."""
    broker = Broker()
    async with rig(tmp_path, broker) as it:
        await write(it.outbox, *range(num_events))
    assert len(broker.received) == num_events
    assert broker.connections_closed >= 1
