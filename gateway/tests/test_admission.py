"""Admission: what is reserved, told and given back."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from headrace_common.errors import (
    BudgetExhausted,
    HeadraceError,
    RateLimited,
    ReplicaLost,
    RequestTooLargeForLimit,
    Unavailable,
)
from headrace_contracts.billing.v1.billing_pb2 import Principal
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_gateway.admission import Admission, denial, duration_text, header_pairs
from headrace_gateway.metrics import GatewayMetrics
from headrace_testing.waiting import eventually

ADMITTED = pb.AdmitResponse(outcome=pb.AdmitResponse.OUTCOME_ADMITTED)


class Limiter:
    """Answers as told and remembers."""

    def __init__(self) -> None:
        self.failures: list[HeadraceError] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.settled: list[pb.SettleRequest] = []
        self.renewed: list[pb.RenewRequest] = []

    async def admit(self, request: pb.AdmitRequest) -> pb.AdmitResponse:
        await self.may_answer.wait()
        self._fail()
        return ADMITTED

    async def settle(self, request: pb.SettleRequest) -> pb.SettleResponse:
        self._fail()
        self.settled.append(request)
        return pb.SettleResponse(settled=True)

    async def renew(self, request: pb.RenewRequest) -> pb.RenewResponse:
        self.renewed.append(request)
        return pb.RenewResponse()

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.pop()


@pytest.fixture
def limiter() -> Limiter:
    return Limiter()


@pytest.fixture
def admission(limiter: Limiter) -> Admission:
    return Admission(limiter, GatewayMetrics(CollectorRegistry()))


async def test_settling_is_tried_again(limiter: Limiter, admission: Admission) -> None:
    """A limiter that is away for a moment still gets the lease back."""
    lease = await admission.admit(Principal(tenant_id="t"), "r1", pb.Amounts(requests=1))
    limiter.failures = [ReplicaLost("x")] * 2
    await lease.settle(pb.Amounts(output_tokens=5))
    assert [it.actual.output_tokens for it in limiter.settled] == [5]


async def test_settling_gives_up_after_a_while(limiter: Limiter, admission: Admission) -> None:
    """It never raises: the lease ends by itself."""
    lease = await admission.admit(Principal(tenant_id="t"), "r1", pb.Amounts(requests=1))
    limiter.failures = [ReplicaLost("x")] * 5
    await lease.settle(pb.Amounts())
    assert limiter.settled == []


async def test_leaving_during_admission_gives_back(limiter: Limiter, admission: Admission) -> None:
    """The charge may have been made when the client left: it is settled with nothing."""
    limiter.may_answer.clear()
    task = asyncio.create_task(admission.admit(Principal(tenant_id="t"), "r1", pb.Amounts()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: [it.lease_id for it in limiter.settled] == ["r1"])
    await admission.close()


async def test_leases_are_renewed_until_settled(
    limiter: Limiter, admission: Admission, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third of their life, by tenant, and not a moment longer."""
    monkeypatch.setattr("headrace_gateway.admission.LEASE_MS", 30)
    lease = await admission.admit(Principal(tenant_id="t"), "r1", pb.Amounts())
    await admission.admit(Principal(tenant_id="t"), "r2", pb.Amounts())
    task = asyncio.create_task(admission.renew_all())
    await eventually(lambda: limiter.renewed)
    assert list(limiter.renewed[0].lease_ids) == ["r1", "r2"]
    await lease.settle(pb.Amounts())
    limiter.renewed.clear()
    await eventually(lambda: limiter.renewed)
    assert list(limiter.renewed[0].lease_ids) == ["r2"]
    task.cancel()


async def test_without_the_limiter(limiter: Limiter, admission: Admission) -> None:
    """Prepaid money is refused, the rest passes."""
    limiter.failures = [ReplicaLost("x")] * 2
    await admission.admit(Principal(tenant_id="t"), "r1", pb.Amounts())
    with pytest.raises(Unavailable):
        await admission.admit(Principal(tenant_id="t", prepaid=True), "r2", pb.Amounts())


@pytest.mark.parametrize(
    ("answer", "error", "retry_after_s"),
    [
        (
            {"outcome": 2, "binding_dimension": 1, "retry_after_us": 29_200_000},
            RateLimited,
            29.2,
        ),
        ({"outcome": 2, "binding_dimension": 6}, RateLimited, 1.0),
        ({"outcome": 2, "binding_dimension": 7, "retry_after_us": 5}, BudgetExhausted, None),
        ({"outcome": 3, "binding_dimension": 9}, BudgetExhausted, None),
        ({"outcome": 3, "binding_dimension": 4}, RequestTooLargeForLimit, None),
        ({"outcome": 4}, Unavailable, 1.0),
    ],
)
def test_denials(
    answer: dict[str, int], error: type[HeadraceError], retry_after_s: float | None
) -> None:
    """Each kind has its own error; waiting is named only where it helps."""
    told = denial(pb.AdmitResponse(**answer))  # type: ignore[arg-type]
    assert type(told) is error
    assert told.retry_after_s == retry_after_s


def test_headers_tell_the_tightest_limit() -> None:
    """Of key, project and tenant the one with the least left."""
    states = [
        pb.DimensionState(dimension=1, limit=10, remaining=9, reset_us=6_000_000),
        pb.DimensionState(dimension=1, limit=5, remaining=4, reset_us=12_000_000),
        pb.DimensionState(dimension=4, limit=1000, remaining=900, reset_us=1),
        pb.DimensionState(dimension=6, limit=2, remaining=1),
    ]
    assert dict(header_pairs(states)) == {
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "4",
        "x-ratelimit-reset-requests": "12s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "900",
        "x-ratelimit-reset-tokens": "1ms",
    }
    assert header_pairs([]) == []


@pytest.mark.parametrize(
    ("duration_us", "text"),
    [
        (0, "0ms"),
        (1, "1ms"),
        (12_000, "12ms"),
        (1_000_000, "1s"),
        (1_500_000, "1.5s"),
        (360_000_000, "6m0s"),
        (61_250_000, "1m1.25s"),
    ],
)
def test_durations(duration_us: int, text: str) -> None:
    """As OpenAI writes them; never rounded down to less than is true."""
    assert duration_text(duration_us) == text
