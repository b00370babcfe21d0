"""Tests of what the guard is told of sent text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from headrace_common.errors import ReplicaLost
from headrace_contracts.guard.v1.guard_pb2 import SentReport
from headrace_gateway.answer import Delivery
from headrace_gateway.metrics import GatewayMetrics
from headrace_gateway.principal import Principal
from headrace_gateway.sent_reports import SentReports, encoded_report
from headrace_gateway.visit import Visit
from headrace_testing.waiting import eventually

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(
    ids=st.tuples(TEXTS, TEXTS, TEXTS),
    sent_chars=st.dictionaries(st.integers(0, 127), st.integers(0, 2**40), max_size=5),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_a_report_by_hand_reads_as_the_message(
    ids: tuple[str, str, str], sent_chars: dict[int, int], flags: tuple[bool, bool]
) -> None:
    """Field by field, whatever the numbers."""
    request_id, tenant_id, key_id = ids
    delivery = Delivery(sent_chars=sent_chars, went_unguarded=flags[0], lost_the_guard=flags[1])
    encoded = encoded_report(request_id, Principal(tenant_id=tenant_id, key_id=key_id), delivery)
    assert SentReport.FromString(encoded) == SentReport(
        request_id=request_id,
        tenant_id=tenant_id,
        key_id=key_id,
        sent_chars=sum(sent_chars.values()),
        sent_chars_by_choice=sent_chars,
        fail_open=flags[0],
        guard_lost=flags[1],
    )


class Guard:
    """Takes reports, unless it is away."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.lost: list[str] = []
        self.is_away = False
        self.connection: object | None = object()

    async def report_sent(self, reports: Sequence[bytes]) -> None:
        if self.is_away:
            raise ReplicaLost("away")
        told = [SentReport.FromString(it) for it in reports]
        self.calls.append([it.request_id for it in told])
        self.lost += [it.request_id for it in told if it.guard_lost]


def visit(request_id: str) -> Visit:
    fields: dict[str, Any] = {
        "request_id": request_id,
        "principal": Principal(tenant_id="acme", key_id="k"),
        "delivery": Delivery(sent_chars={0: 7}),
    }
    return cast("Visit", SimpleNamespace(**fields))


async def test_reports_gather_and_none_is_told_twice() -> None:
    """Nobody waits for them, and a call costs about the same whatever it holds."""
    guard = Guard()
    reports = SentReports(guard, GatewayMetrics(CollectorRegistry()))
    running = asyncio.create_task(reports.run())
    for number in range(20):
        reports.tell(visit(f"req_{number}"))
        await asyncio.sleep(0)
    await eventually(lambda: bool(guard.calls))
    reports.tell(visit("req_20"))
    await eventually(lambda: len(guard.calls) == 2)
    assert guard.calls == [[f"req_{number}" for number in range(20)], ["req_20"]]
    running.cancel()


@pytest.mark.parametrize("then", [None, object()], ids=["away", "another"])
async def test_a_report_to_another_guard_than_the_answers_says_so(then: object | None) -> None:
    """The one that judged was killed, maybe before it had written down what it released."""
    guard = Guard()
    reports = SentReports(guard, GatewayMetrics(CollectorRegistry()))
    reports.tell(visit("req_1"))
    guard.connection = then
    reports.tell(visit("req_2"))
    await reports.flush(1.0)
    assert guard.calls == [["req_1", "req_2"]]
    assert guard.lost == (["req_1", "req_2"] if then is None else ["req_1"])


async def test_reports_wait_while_the_guard_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are tried again, and once more before the process ends."""
    monkeypatch.setattr("headrace_gateway.sent_reports._RETRY_S", 0.01)
    guard = Guard()
    guard.is_away = True
    reports = SentReports(guard, GatewayMetrics(CollectorRegistry()))
    running = asyncio.create_task(reports.run())
    reports.tell(visit("req_1"))
    await asyncio.sleep(0.2)
    guard.is_away = False
    await eventually(lambda: guard.calls == [["req_1"]])
    running.cancel()
    reports.tell(visit("req_2"))
    await reports.flush(1.0)
    assert guard.calls == [["req_1"], ["req_2"]]
