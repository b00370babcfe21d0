"""Tests of the way from the contract to charges and back."""

from __future__ import annotations

import pytest

from headrace_common.errors import InvalidRequest
from headrace_common.limits.limiter import NEVER, Decision, Kind, Outcome, State
from headrace_common.limits.plans import Plan, Plans, amounts_of, answer_of
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb


def plan_of(request: pb.AdmitRequest) -> Plan:
    return Plans().of(request)


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
    charges = plan.charges.charges
    assert [place.dimension for place in plan.charges.places] == list(range(1, 10))
    assert [charge.limit for charge in charges] == list(range(1, 10))
    costs = [plan.amounts.of(charge.measure) for charge in charges]
    assert costs == [1, 10, 20, 30, 1, 1, 30, 30, 30]
    assert plan.charges.budgets == (6, 7, 8)


def test_zero_is_no_limit_except_for_a_budget() -> None:
    """An absent budget is none; a budget of zero is one."""
    assert plan_of(request(scope(requests_per_minute=0, max_concurrent=0))).charges.charges == ()
    plan = plan_of(request(scope(day_budget_nano_usd=0)))
    assert [charge.kind for charge in plan.charges.charges] == [Kind.DAY_BUDGET]


def test_the_same_id_at_two_levels_is_two_scopes() -> None:
    """A key and a project may be named alike."""
    plan = plan_of(
        request(scope(requests_per_minute=1), scope(pb.LEVEL_PROJECT, requests_per_minute=1))
    )
    assert len({charge.name for charge in plan.charges.charges}) == 2


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


def test_scopes_seen_before_are_not_encoded_again() -> None:
    """By value: a changed limit is another set, and so is another tenant's."""
    plans = Plans(max_sets=2)
    first = plans.of(request(scope(requests_per_minute=1))).charges
    assert plans.of(request(scope(requests_per_minute=1))).charges is first
    changed = plans.of(request(scope(requests_per_minute=2))).charges
    assert [it.limit for it in changed.charges] == [2]
    other = request(scope(requests_per_minute=1))
    other.tenant_id = "other"
    assert plans.of(other).charges is not first
    # Two are kept.
    assert plans.of(request(scope(requests_per_minute=1))).charges is not first


@pytest.mark.parametrize(
    "amounts",
    [
        pb.Amounts(input_tokens=50_000_001),
        pb.Amounts(cost_nano_usd=9_000_000_000_000_001),
        pb.Amounts(input_tokens=1, cached_input_tokens=2),
    ],
)
def test_refuses_amounts_that_cannot_be_counted_exactly(amounts: pb.Amounts) -> None:
    """Doubles are whole below 2**53; a part is not larger than its whole."""
    with pytest.raises(InvalidRequest):
        amounts_of(amounts)
