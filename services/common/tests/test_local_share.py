"""Tests of what is granted while Redis is away."""

from __future__ import annotations

import pytest

from headrace_common.limits.limiter import Amounts, Kind
from headrace_common.limits.local_share import LocalShare
from headrace_common.limits.plans import Plan, Plans
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_testing.clock import FakeClock

ADMITTED, DENIED = pb.AdmitResponse.OUTCOME_ADMITTED, pb.AdmitResponse.OUTCOME_DENIED


def plan(lease: str = "l", cost: int = 0, *, prepaid: bool = False, **limits: int) -> Plan:
    return Plans().of(
        pb.AdmitRequest(
            lease_id=lease,
            tenant_id="acme",
            scopes=[pb.Scope(level=pb.LEVEL_KEY, scope_id="k", limits=pb.Limits(**limits))],
            reserve=pb.Amounts(requests=1, cost_nano_usd=cost),
            lease_ms=60_000,
            prepaid=prepaid,
        )
    )


@pytest.mark.parametrize(("num_replicas", "admitted"), [(1, 12), (4, 3)])
def test_rates_go_by_this_replicas_share(
    clock: FakeClock, num_replicas: int, admitted: int
) -> None:
    """All replicas together grant about the limit, and go on refilling."""
    local = LocalShare(num_replicas, 0.05, clock)
    answers = [local.admit(plan(f"l{n}", requests_per_minute=12)) for n in range(20)]
    assert [a.outcome for a in answers].count(ADMITTED) == admitted
    assert all(answer.degraded for answer in answers)
    clock.advance(60)
    assert local.admit(plan("later", requests_per_minute=12)).outcome == ADMITTED


def test_prepaid_money_is_refused_and_prepaid_without_a_budget_is_not(clock: FakeClock) -> None:
    """What cannot be checked is not lent; where there is nothing to check, nothing is refused."""
    local = LocalShare(1, 0.05, clock)
    refused = local.admit(plan(prepaid=True, total_budget_nano_usd=10**9))
    assert refused.outcome == pb.AdmitResponse.OUTCOME_UNAVAILABLE
    assert refused.degraded
    assert local.admit(plan(prepaid=True, requests_per_minute=5)).outcome == ADMITTED


def test_postpaid_keys_spend_at_most_the_overdraft(clock: FakeClock) -> None:
    """5 % of 1000, no more, though each request alone would be small."""
    local = LocalShare(1, 0.05, clock)
    answers = [local.admit(plan(f"l{n}", 20, month_budget_nano_usd=1000)) for n in range(5)]
    assert [a.outcome for a in answers] == [ADMITTED, ADMITTED, DENIED, DENIED, DENIED]
    local.settle("acme", "l0", Amounts(cost_nano_usd=10))
    assert local.admit(plan("more", 20, month_budget_nano_usd=1000)).outcome == ADMITTED


def test_no_more_is_lent_than_was_left_when_redis_last_said_so(clock: FakeClock) -> None:
    """An exhausted budget stays exhausted in an outage."""
    local = LocalShare(1, 0.5, clock)
    it = plan(cost=10, month_budget_nano_usd=1000)
    local.note(it.tenant_id, it.charges, [5])
    assert local.admit(it).outcome == DENIED


@pytest.mark.parametrize(("num_replicas", "admitted"), [(1, 4), (2, 2)])
def test_a_rate_goes_on_from_what_was_left_of_it(
    clock: FakeClock, num_replicas: int, admitted: int
) -> None:
    """An outage of a moment gives nobody their minute or day anew."""
    for limits in ({"requests_per_minute": 12}, {"requests_per_day": 12}):
        local = LocalShare(num_replicas, 0.05, clock)
        known = plan(**limits)
        local.note("acme", known.charges, [4])
        answers = [local.admit(plan(f"l{n}", **limits)) for n in range(20)]
        assert [a.outcome for a in answers].count(ADMITTED) == admitted


def test_a_rate_that_was_used_up_comes_back_with_time(clock: FakeClock) -> None:
    """As it does where it is known better."""
    local = LocalShare(1, 0.05, clock)
    local.note("acme", plan(requests_per_minute=12).charges, [0])
    assert local.admit(plan("a", requests_per_minute=12)).outcome == DENIED
    clock.advance(5)
    assert local.admit(plan("a", requests_per_minute=12)).outcome == ADMITTED
    assert local.admit(plan("b", requests_per_minute=12)).outcome == DENIED


def test_what_was_granted_in_an_outage_counts_in_the_next(clock: FakeClock) -> None:
    """The other side never hears of it: its word does not cover it."""
    local = LocalShare(1, 0.05, clock)
    for limits in ({"requests_per_minute": 4}, {"requests_per_day": 4}):
        granted = 0
        for outage in range(5):
            local.note("acme", plan(**limits).charges, [4])
            answers = [local.admit(plan(f"l{outage}{n}", **limits)) for n in range(2)]
            granted += [a.outcome for a in answers].count(ADMITTED)
        assert granted == 4


def test_a_lease_granted_here_names_the_budgets_to_book_it_to_once(clock: FakeClock) -> None:
    """Money spent in an outage reaches Redis afterwards."""
    local = LocalShare(1, 0.5, clock)
    it = plan(cost=10, month_budget_nano_usd=1000, requests_per_minute=5)
    local.admit(it)
    assert local.owns("acme", "l")
    foreign = local.settle("acme", "l", Amounts(cost_nano_usd=10))
    assert foreign == [(Kind.MONTH_BUDGET, it.charges.charges[1].scope)]
    assert local.settle("acme", "l", Amounts(cost_nano_usd=10)) is None


def test_slots_are_kept_by_renewal_and_freed_by_expiry(clock: FakeClock) -> None:
    """Leases live as they do in Redis."""
    local = LocalShare(1, 0.5, clock)
    assert local.admit(plan("a", max_concurrent=1)).outcome == ADMITTED
    clock.advance(50)
    local.renew("acme", ["a"], 60_000_000)
    clock.advance(50)
    assert local.admit(plan("b", max_concurrent=1)).outcome == DENIED
    clock.advance(11)
    assert local.admit(plan("b", max_concurrent=1)).outcome == ADMITTED


def test_what_the_whole_limit_could_hold_is_not_too_large_for_the_share(clock: FakeClock) -> None:
    """An outage makes nobody's request wrong; it uses up the share."""
    local = LocalShare(4, 0.5, clock)

    def admit(lease: str, tokens: int) -> pb.AdmitResponse:
        request = pb.AdmitRequest(
            lease_id=lease,
            tenant_id="acme",
            scopes=[
                pb.Scope(level=1, scope_id="k", limits=pb.Limits(output_tokens_per_minute=1000))
            ],
            reserve=pb.Amounts(output_tokens=tokens),
            lease_ms=60_000,
        )
        return local.admit(Plans().of(request))

    assert admit("a", 600).outcome == ADMITTED
    assert admit("b", 600).outcome == DENIED
    assert admit("c", 1001).outcome == pb.AdmitResponse.OUTCOME_TOO_LARGE
    clock.advance(60)
    assert admit("d", 250).outcome == ADMITTED
