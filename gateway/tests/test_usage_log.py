"""Tests of the usage log: one closed event per admitted request, whatever the ending."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from headrace_common.clock import SystemClock, unix_us
from headrace_common.errors import Unavailable
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1.usage_pb2 import (
    ENDING_COMPLETED,
    ENDING_SWEPT,
    PRICE_TIER_STANDARD,
    UsageEvent,
)
from headrace_gateway.outbox import Outbox
from headrace_gateway.outbox_metrics import OutboxMetrics
from headrace_gateway.relay import Relay
from headrace_gateway.segments import list_segments, read_segment
from headrace_gateway.usage_log import OutboxUsageLog


class Nowhere:
    """A sink and ledger that are never reached."""

    async def send(self, events: list[UsageEvent]) -> None:
        raise ConnectionError

    async def stop(self) -> None:
        """Nothing to end."""

    async def find_missing(self, events: list[UsageEvent]) -> set[tuple[str, int]]:
        raise ConnectionError

    async def close(self) -> None:
        """Nothing to end."""


def usage_log(
    folder: Path, registry: CollectorRegistry | None = None, **limits: float
) -> OutboxUsageLog:
    clock, metrics = SystemClock(), OutboxMetrics(registry or CollectorRegistry())
    outbox = Outbox(folder, clock, metrics, **limits)
    relay = Relay(outbox, Nowhere(), Nowhere(), clock, metrics)
    return OutboxUsageLog(outbox, relay, clock, metrics)


def opened(request_id: str, deadline_in_s: float = 60) -> UsageEvent:
    return UsageEvent(
        kind=UsageEvent.KIND_OPENED,
        request_id=request_id,
        tenant_id="acme",
        project_id="default",
        key_id="key_1",
        model="m",
        price_version=3,
        price_tier=PRICE_TIER_STANDARD,
        admitted_unix_us=1_700_000_000_000_000,
        hold_nano_usd=500,
        deadline_unix_us=unix_us(SystemClock()) + int(deadline_in_s * 1e6),
        endpoint="/v1/chat/completions",
        streaming=True,
    )


def closed(request_id: str) -> UsageEvent:
    event = opened(request_id)
    event.kind, event.ending = UsageEvent.KIND_CLOSED, ENDING_COMPLETED
    event.usage.CopyFrom(TokenUsage(prompt_tokens=5, output_tokens=7))
    return event


def on_disk(folder: Path) -> list[UsageEvent]:
    return [
        UsageEvent.FromString(payload)
        for segment in list_segments(folder)
        for payload in read_segment(folder, segment)
    ]


async def test_a_closed_event_is_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    """The last bytes go to the client only then."""
    log = usage_log(tmp_path)
    await log.start()
    log.opened(opened("req_1"))
    await log.closed(closed("req_1"))
    kinds = [(e.request_id, e.kind) for e in on_disk(tmp_path)]
    assert kinds == [("req_1", UsageEvent.KIND_OPENED), ("req_1", UsageEvent.KIND_CLOSED)]
    await log.close()


async def test_an_opened_event_is_on_disk_at_once_for_who_waits(tmp_path: Path) -> None:
    """Not only after what nobody waits for may linger; waiting twice is waiting once."""
    log = usage_log(tmp_path)
    await log.start()
    recorded = log.opened(opened("req_1"))
    assert not recorded.done()
    await log.until_recorded(recorded)
    assert [e.request_id for e in on_disk(tmp_path)] == ["req_1"]
    await log.until_recorded(recorded)
    await log.close()


async def test_what_a_dead_process_left_open_is_closed_as_swept(tmp_path: Path) -> None:
    """Exactly one closed event per request, with all that billing needs to book it."""
    log = usage_log(tmp_path)
    await log.start()
    log.opened(opened("req_1"))
    log.opened(opened("req_2"))
    await log.closed(closed("req_2"))
    await log.close()
    registry = CollectorRegistry()
    log = usage_log(tmp_path, registry)
    await log.start()
    await log.close()
    closes = {e.request_id: e for e in on_disk(tmp_path) if e.kind == UsageEvent.KIND_CLOSED}
    swept = closes["req_1"]
    assert swept.ending == ENDING_SWEPT
    assert swept.estimated
    assert swept.usage == TokenUsage()
    assert swept.HasField("usage")
    for name in (
        "tenant_id", "project_id", "key_id", "model", "price_version", "admitted_unix_us",
        "endpoint",
    ):  # fmt: skip
        assert getattr(swept, name) == getattr(opened("req_1"), name)
    admitted_us = swept.occurred_unix_us - round(swept.duration_s * 1e6)
    assert abs(admitted_us - opened("req_1").occurred_unix_us) <= 1
    assert closes["req_2"].ending == ENDING_COMPLETED
    assert registry.get_sample_value("headrace_gateway_outbox_swept_total") == 1
    # A third start finds nothing to sweep.
    log = usage_log(tmp_path)
    await log.start()
    await log.close()
    assert sum(e.kind == UsageEvent.KIND_CLOSED for e in on_disk(tmp_path)) == 2


async def test_a_full_outbox_refuses_new_requests_and_still_closes_running_ones(
    tmp_path: Path,
) -> None:
    """What was admitted is billed."""
    log = usage_log(tmp_path, max_bytes=150)
    await log.start()
    log.opened(opened("req_1"))
    await log.closed(closed("req_1"))
    assert log.is_full
    with pytest.raises(Unavailable):
        log.opened(opened("req_2"))
    await log.closed(closed("req_3"))
    await log.close()
    assert {e.request_id for e in on_disk(tmp_path)} == {"req_1", "req_3"}


@pytest.mark.parametrize(("deadline_in_s", "is_open"), [(60, True), (-120, False)])
async def test_a_request_pins_its_segment_until_long_after_its_deadline(
    tmp_path: Path, deadline_in_s: float, is_open: bool
) -> None:
    """A request that is never closed by mistake must not keep the disk filling."""
    log = usage_log(tmp_path)
    await log.start()
    log.opened(opened("req_1", deadline_in_s))
    assert log._relay.is_pinned("req_1") is is_open
    await log.closed(closed("req_1"))
    assert not log._relay.is_pinned("req_1")
    await log.close()
