"""Tests of the way from the contract to charges and back."""

from __future__ import annotations

import pytest

from headrace_common.errors import InvalidRequest
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_ratelimit.limiter import NEVER, Decision, Kind, Outcome, State
from headrace_ratelimit.plans import answer_of, plan_of, share_of


def request(*scopes: pb.Scope, **reserve: int) -> pb.AdmitRequest:
    return pb.AdmitRequest(
        lease_id="l",
        tenant_id="acme",
        scopes=scopes,
        reserve=pb.Amounts(**reserve),
        lease_ms=1000,
    )


def scope(level: int = pb.LEVEL_KEY, scope_id: str = "k", **limits: int) -> pb.Scope:
    return pb.Scope(level=level, scope_id=scope_id, limits=pb.Limits(**limits))


def test_every_limit_becomes_one_charge_of_its_own_amount() -> None:
    """Nine kinds of limit, each with what it counts."""
    plan = plan_of(
        request(
            scope(
                requests_per_minute=1,
                input_tokens_per_minute=2,
                output_tokens_per_minute=3,
                tokens_per_minute=4,
                requests_per_day=5,
                max_concurrent=6,
                day_budget_nano_usd=7,
                month_budget_nano_usd=8,
                total_budget_nano_usd=9,
            ),
            requests=1,
            input_tokens=10,
            output_tokens=20,
            cost_nano_usd=30,
        )
    )
    assert [place.dimension for place in plan.places] == list(range(1, 10))
    assert [charge.limit for charge in plan.charges] == list(range(1, 10))
    assert [charge.cost for charge in plan.charges] == [1, 10, 20, 30, 1, 1, 30, 30, 30]
    assert plan.has_budget


def test_zero_is_no_limit_except_for_a_budget() -> None:
    """An absent budget is none; a budget of zero is one."""
    assert plan_of(request(scope(requests_per_minute=0, max_concurrent=0))).charges == []
    plan = plan_of(request(scope(day_budget_nano_usd=0)))
    assert [charge.kind for charge in plan.charges] == [Kind.DAY_BUDGET]


def test_the_same_id_at_two_levels_is_two_scopes() -> None:
    """A key and a project may be named alike."""
    plan = plan_of(
        request(scope(requests_per_minute=1), scope(pb.LEVEL_PROJECT, requests_per_minute=1))
    )
    assert len({charge.name for charge in plan.charges}) == 2


def test_refuses_a_scope_that_comes_twice() -> None:
    """Its dimensions would be charged twice and checked once."""
    with pytest.raises(InvalidRequest, match="twice"):
        plan_of(request(scope(requests_per_minute=1), scope(requests_per_minute=1)))


@pytest.mark.parametrize(("wait_us", "retry_after_us"), [(NEVER, 0), (5, 5)])
def test_an_answer_names_the_binding_dimension(wait_us: int, retry_after_us: int) -> None:
    """With level, wait and all states."""
    plan = plan_of(request(scope(requests_per_minute=9), scope(pb.LEVEL_TENANT, max_concurrent=3)))
    decision = Decision(Outcome.DENIED, 1, wait_us, [State(8, 7), State(0, 0)])
    assert answer_of(plan, decision, degraded=True) == pb.AdmitResponse(
        outcome=pb.AdmitResponse.OUTCOME_DENIED,
        binding_level=pb.LEVEL_TENANT,
        binding_dimension=pb.DIMENSION_CONCURRENCY,
        retry_after_us=retry_after_us,
        degraded=True,
        states=[
            pb.DimensionState(
                level=pb.LEVEL_KEY,
                dimension=pb.DIMENSION_REQUESTS_PER_MINUTE,
                limit=9,
                remaining=8,
                reset_us=7,
            ),
            pb.DimensionState(level=pb.LEVEL_TENANT, dimension=pb.DIMENSION_CONCURRENCY, limit=3),
        ],
    )


def test_a_share_is_never_nothing() -> None:
    """A limit below the number of replicas still lets one through at each."""
    (charge,) = plan_of(request(scope(requests_per_minute=3))).charges
    assert [share_of(charge, n).limit for n in (1, 2, 5)] == [3, 1, 1]
