"""Admission: what is reserved, told and given back."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from headrace_common.errors import (
    BudgetExhausted,
    HeadraceError,
    Internal,
    RateLimited,
    ReplicaLost,
    RequestTooLargeForLimit,
    Unavailable,
)
from headrace_contracts.billing.v1.billing_pb2 import ModelLimits
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_gateway.admission import Admission, denial
from headrace_gateway.limit_states import Standing
from headrace_gateway.metrics import GatewayMetrics
from headrace_gateway.principal import Principal
from headrace_testing.waiting import eventually

ADMITTED = pb.AdmitResponse(outcome=pb.AdmitResponse.OUTCOME_ADMITTED)


class Limiter:
    """Answers as told and remembers."""

    def __init__(self) -> None:
        self.failures: list[HeadraceError] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.admitted: list[pb.AdmitRequest] = []
        self.lost: set[str] = set()
        self.settled: list[pb.SettleRequest] = []
        self.renewed: list[pb.RenewRequest] = []

    async def admit(self, request: pb.AdmitRequest) -> pb.AdmitResponse:
        self.admitted.append(request)
        await self.may_answer.wait()
        self._fail()
        return ADMITTED

    async def settle(self, request: pb.SettleRequest) -> pb.SettleResponse:
        self._fail()
        self.settled.append(request)
        return pb.SettleResponse(settled=True)

    def settle_soon(self, request: pb.SettleRequest) -> None:
        return None

    async def renew(self, request: pb.RenewRequest) -> pb.RenewResponse:
        self.renewed.append(request)
        self._fail()
        lost = [it for it in request.lease_ids if it in self.lost]
        return pb.RenewResponse(unknown_lease_ids=lost)

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.pop()


@pytest.fixture
def limiter() -> Limiter:
    return Limiter()


@pytest.fixture
def admission(limiter: Limiter) -> Admission:
    return Admission(limiter, GatewayMetrics(CollectorRegistry()))


async def test_settling_never_raises(limiter: Limiter, admission: Admission) -> None:
    """A limiter that objects has the last word: the lease ends by itself."""
    lease = await admission.admit(Principal(tenant_id="t"), "r1", pb.Amounts(requests=1))
    limiter.failures = [Internal()]
    await lease.settle(pb.Amounts(output_tokens=5))
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
    told = denial(pb.AdmitResponse(**answer), Standing())  # type: ignore[arg-type]
    assert type(told) is error
    assert told.retry_after_s == retry_after_s


async def test_a_lease_that_the_limiter_lost_is_told_to_it_again(
    limiter: Limiter, admission: Admission
) -> None:
    """With all that it holds; one that was settled meanwhile is given back."""
    reserve = pb.Amounts(requests=1, output_tokens=7)
    lease = await admission.admit(Principal(tenant_id="t"), "r1", reserve)
    await admission.admit(Principal(tenant_id="t"), "r2", reserve)
    limiter.lost, limiter.admitted = {"r1"}, []
    await admission.renew_now()
    assert [(it.lease_id, it.restore) for it in limiter.admitted] == [("r1", True)]
    assert limiter.admitted[0].reserve == reserve

    limiter.may_answer.clear()
    restoring = asyncio.create_task(admission.renew_now())
    await eventually(lambda: len(limiter.admitted) == 2)
    await lease.settle(pb.Amounts(output_tokens=3))
    limiter.may_answer.set()
    await restoring
    await eventually(lambda: [it.lease_id for it in limiter.settled] == ["r1", "r1"])
    await admission.close()


async def test_a_failed_renewal_is_tried_again_before_the_leases_end(
    limiter: Limiter, admission: Admission, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limiter that is away for a moment costs nobody a slot."""
    monkeypatch.setattr("headrace_gateway.admission.LEASE_MS", 30)
    await admission.admit(Principal(tenant_id="t"), "r1", pb.Amounts())
    limiter.failures = [ReplicaLost("x")]
    task = asyncio.create_task(admission.renew_all())
    await eventually(lambda: len(limiter.renewed) >= 2)
    task.cancel()


def test_a_request_is_charged_to_its_model_too() -> None:
    """By tenant and model; other models' limits are not its own."""
    key = pb.Scope(level=pb.LEVEL_KEY, scope_id="k", limits=pb.Limits(requests_per_minute=1))
    principal = Principal(
        tenant_id="t",
        limits=[key],
        model_limits=[
            ModelLimits(model="a", limits=pb.Limits(tokens_per_minute=5)),
            ModelLimits(model="b", limits=pb.Limits(tokens_per_minute=6)),
        ],
    )
    of_model = pb.Scope(level=pb.LEVEL_MODEL, scope_id="t/b", limits=pb.Limits(tokens_per_minute=6))
    assert principal.charged("b").scopes == [key, of_model]
    assert principal.charged("c").scopes == [key]


async def test_standing_is_asked_without_charging(limiter: Limiter, admission: Admission) -> None:
    """And is nothing where there are no limits, or nobody to ask."""
    assert await admission.standing(Principal(tenant_id="t")) == Standing()
    assert limiter.admitted == []
    limited = Principal(tenant_id="t", limits=[pb.Scope(level=pb.LEVEL_KEY, scope_id="k")])
    await admission.standing(limited)
    assert [(it.peek, it.reserve) for it in limiter.admitted] == [(True, pb.Amounts())]
    limiter.failures = [ReplicaLost("x")]
    assert await admission.standing(limited) == Standing()
