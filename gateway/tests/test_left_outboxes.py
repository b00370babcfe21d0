"""Tests of what gateways leave behind in seats that nobody takes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from prometheus_client import CollectorRegistry

from headrace_common.clock import SystemClock
from headrace_common.lifecycle import cancel_and_wait
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent
from headrace_gateway.left_outboxes import LeftOutboxes, places_with_events
from headrace_gateway.outbox import Outbox
from headrace_gateway.outbox_metrics import OutboxMetrics
from headrace_gateway.outbox_place import take_place
from headrace_gateway.relay import Relay
from headrace_gateway.usage_log import OutboxUsageLog
from headrace_testing.waiting import eventually


class Books:
    """Broker and ledger in one: what is sent is booked."""

    def __init__(self) -> None:
        self.booked: list[UsageEvent] = []

    async def send(self, events: list[UsageEvent]) -> None:
        self.booked += events

    async def stop(self) -> None:
        """Nothing to end."""

    async def find_missing(self, events: list[UsageEvent]) -> set[tuple[str, int]]:
        booked = {(event.request_id, event.kind) for event in self.booked}
        return {(event.request_id, event.kind) for event in events} - booked

    async def close(self) -> None:
        """Nothing to end."""


async def leave_an_open_request(place: Path) -> None:
    """Write what a gateway leaves that is killed before it could tell anybody."""
    clock, metrics = SystemClock(), OutboxMetrics(CollectorRegistry())
    outbox = Outbox(place, clock, metrics)
    log = OutboxUsageLog(outbox, None, clock, metrics)
    await log.start()
    log.opened(UsageEvent(kind=UsageEvent.KIND_OPENED, request_id=f"req_{place.name}"))
    await log.close()


@contextlib.asynccontextmanager
async def looked_after(folder: Path, books: Books) -> AsyncIterator[None]:
    clock = SystemClock()

    def open_log(place: Path) -> OutboxUsageLog:
        metrics = OutboxMetrics(CollectorRegistry())
        outbox = Outbox(place, clock, metrics, segment_age_s=0.05)
        relay = Relay(outbox, books, books, clock, metrics, confirm_interval_s=0.05)
        return OutboxUsageLog(outbox, relay, clock, metrics)

    task = asyncio.create_task(LeftOutboxes(folder, open_log).keep())
    try:
        yield
    finally:
        await cancel_and_wait(task)


async def test_what_was_left_is_closed_booked_and_given_back(tmp_path: Path) -> None:
    """In any seat, and in the folder itself, from before it had seats."""
    places = [tmp_path, tmp_path / "1", tmp_path / "3"]
    for place in places:
        await leave_an_open_request(place)
    books = Books()
    async with looked_after(tmp_path, books):
        await eventually(lambda: not list(places_with_events(tmp_path)), within_s=20)
    booked = sorted((event.request_id, event.kind) for event in books.booked)
    names = sorted(f"req_{place.name}" for place in places)
    both = UsageEvent.KIND_OPENED, UsageEvent.KIND_CLOSED
    assert booked == [(name, kind) for name in names for kind in both]
    for place in places:
        take_place(place).release()


async def test_an_outbox_of_a_process_that_lives_is_left_alone(tmp_path: Path) -> None:
    """Until that process is gone."""
    for name in "12":
        await leave_an_open_request(tmp_path / name)
    alive, books = take_place(tmp_path / "1"), Books()
    async with looked_after(tmp_path, books):
        only = [tmp_path / "1"]
        await eventually(lambda: list(places_with_events(tmp_path)) == only, within_s=20)
    assert {event.request_id for event in books.booked} == {"req_2"}
    alive.release()
