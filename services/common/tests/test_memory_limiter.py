"""Tests of all limits in memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace_common.limits.limiter import (
    MINUTE_US,
    NEVER,
    Amounts,
    Charge,
    Kind,
    Measure,
    Mode,
    Outcome,
)
from headrace_common.limits.memory_limiter import Hold, MemoryLimiter

NOW_US = 1_796_000_000_000_000


def rate(limit: int) -> Charge:
    return Charge("rate", Kind.RATE, Measure.REQUESTS, limit)


def budget(limit: int, kind: Kind = Kind.TOTAL_BUDGET) -> Charge:
    return Charge("budget", kind, Measure.COST, limit)


def of(requests: int = 1) -> Amounts:
    return Amounts(requests=requests)


def money(cost: int) -> Amounts:
    return Amounts(cost_nano_usd=cost)


@given(st.integers(1, 500))
def test_a_rate_lets_exactly_its_limit_through_at_once(limit: int) -> None:
    """No rounding costs or gives a request, whatever the limit."""
    limiter = MemoryLimiter()
    outcomes = [
        limiter.admit(f"lease-{n}", 1, [rate(limit)], of(), NOW_US).outcome
        for n in range(limit + 3)
    ]
    assert outcomes.count(Outcome.ADMITTED) == limit


@given(st.integers(1, 100), st.lists(st.integers(0, 20_000_000), max_size=80))
def test_no_minute_sees_more_than_two_limits_and_no_hour_drifts(
    limit: int, gaps_us: list[int]
) -> None:
    """Burst plus refill: at most limit * (1 + minutes) in any stretch of time."""
    limiter, now_us = MemoryLimiter(), NOW_US
    admitted = 0
    for n, gap_us in enumerate(gaps_us):
        now_us += gap_us
        admitted += (
            limiter.admit(f"{n}", 1, [rate(limit)], of(), now_us).outcome is Outcome.ADMITTED
        )
    assert admitted * MINUTE_US <= limit * (MINUTE_US + now_us - NOW_US)


@given(st.integers(1, 1000), st.integers(0, 50), st.integers(1, 50))
def test_the_wait_of_a_denial_is_true_to_the_microsecond(limit: int, used: int, cost: int) -> None:
    """After the wait the same request passes; a microsecond earlier it does not."""
    used, cost = min(used, limit), min(cost, limit)
    limiter = MemoryLimiter()
    assert limiter.admit("used", 1, [rate(limit)], of(used), NOW_US).outcome is Outcome.ADMITTED
    decision = limiter.admit("a", 1, [rate(limit)], of(cost), NOW_US)
    if decision.outcome is Outcome.DENIED:
        early_us = NOW_US + decision.wait_us - 1
        assert limiter.admit("a", 1, [rate(limit)], of(cost), early_us).outcome is Outcome.DENIED
        at_us = NOW_US + decision.wait_us
        assert limiter.admit("a", 1, [rate(limit)], of(cost), at_us).outcome is Outcome.ADMITTED


@given(st.integers(1, 300), st.integers(0, 300), st.integers(0, 300))
def test_settling_with_the_truth_leaves_what_reserving_the_truth_would_have(
    limit: int, reserved: int, used: int
) -> None:
    """Reserve, then correct: the same state as if the estimate had been right."""
    reserved, used = min(reserved, limit), min(used, limit)
    guessed, exact = MemoryLimiter(), MemoryLimiter()
    guessed.admit("a", MINUTE_US, [rate(limit)], of(reserved), NOW_US)
    guessed.settle("a", Amounts(requests=used), NOW_US)
    exact.admit("a", MINUTE_US, [rate(limit)], of(used), NOW_US)
    states = [
        it.admit("", 1, [rate(limit)], of(0), NOW_US, Mode.PEEK).states for it in (guessed, exact)
    ]
    assert states[0] == states[1]


def test_a_day_budget_denies_until_midnight_and_a_total_for_ever() -> None:
    """What is spent is spent; a new window is new."""
    midnight_us = NOW_US - NOW_US % 86_400_000_000 + 86_400_000_000
    limiter = MemoryLimiter()
    for kind in (Kind.DAY_BUDGET, Kind.TOTAL_BUDGET):
        limiter.admit(kind.name, MINUTE_US, [budget(10, kind)], money(10), NOW_US)
        limiter.settle(kind.name, Amounts(cost_nano_usd=10), NOW_US)
    day = limiter.admit("a", 1, [budget(10, Kind.DAY_BUDGET)], money(1), NOW_US)
    total = limiter.admit("a", 1, [budget(10)], money(1), NOW_US)
    assert (day.wait_us, total.wait_us) == (midnight_us - NOW_US, NEVER)
    later = limiter.admit("a", 1, [budget(10, Kind.DAY_BUDGET)], money(1), midnight_us)
    assert later.outcome is Outcome.ADMITTED


def test_the_cost_goes_to_the_window_of_the_admission() -> None:
    """A request over midnight is yesterday's."""
    midnight_us = NOW_US - NOW_US % 86_400_000_000 + 86_400_000_000
    limiter = MemoryLimiter()
    limiter.admit("a", MINUTE_US, [budget(10, Kind.DAY_BUDGET)], money(10), midnight_us - 1)
    limiter.settle("a", Amounts(cost_nano_usd=10), midnight_us + 1)
    left = limiter.admit("b", 1, [budget(10, Kind.DAY_BUDGET)], money(0), midnight_us + 1)
    assert left.states[0].remaining == 10


def test_a_missing_budget_asks_the_ledger_before_anybody_decides() -> None:
    """Lost is not unused; once told, holds of running requests count too."""
    limiter = MemoryLimiter(has_ledger=True)
    it = budget(100)
    assert limiter.admit("a", MINUTE_US, [it], money(1), NOW_US).outcome is Outcome.UNSEEDED
    limiter.seed([(it, NOW_US, 60)], [Hold("running", [it], NOW_US, 30)], MINUTE_US, NOW_US)
    assert limiter.admit("a", MINUTE_US, [it], money(11), NOW_US).outcome is Outcome.DENIED
    assert limiter.admit("a", MINUTE_US, [it], money(10), NOW_US).outcome is Outcome.ADMITTED
    # Settled as if nothing had happened.
    assert limiter.settle("running", money(5), NOW_US)
    peeked = limiter.admit("", 1, [it], money(0), NOW_US, Mode.PEEK)
    assert peeked.states[0].remaining == 100 - 60 - 10 - 5


def test_the_ledger_only_raises_what_is_spent() -> None:
    """It runs behind: what it lacks was spent all the same."""
    limiter = MemoryLimiter(has_ledger=True)
    it = budget(100)
    for spent, remaining in ((60, 40), (50, 40), (70, 30)):
        limiter.seed([(it, NOW_US, spent)], [], 1, NOW_US)
        peeked = limiter.admit("", 1, [it], money(0), NOW_US, Mode.PEEK)
        assert peeked.states[0].remaining == remaining


def test_a_restored_lease_takes_slots_and_money_and_no_rates() -> None:
    """The request was counted before the store lost it; it runs on."""
    limiter = MemoryLimiter()
    charges = [rate(1), Charge("slots", Kind.SLOTS, Measure.LEASES, 1), budget(10)]
    amounts = Amounts(requests=1, cost_nano_usd=20)
    limiter.admit("b", MINUTE_US, charges, Amounts(requests=1), NOW_US)
    restored = limiter.admit("a", MINUTE_US, charges, amounts, NOW_US, Mode.RESTORE)
    assert restored.outcome is Outcome.ADMITTED
    assert [state.remaining for state in restored.states] == [0, 0, 0]
    limiter.settle("a", Amounts(requests=0, cost_nano_usd=4), NOW_US)
    limiter.settle("b", Amounts(requests=1), NOW_US)
    peeked = limiter.admit("", 1, charges, Amounts(), NOW_US, Mode.PEEK)
    assert [state.remaining for state in peeked.states] == [0, 1, 6]


def test_a_lease_that_was_lengthened_ends_at_its_new_time() -> None:
    """The sweep skips only what cannot have ended yet, whatever order leases end in."""
    limiter = MemoryLimiter()
    slots = [Charge("k", Kind.SLOTS, Measure.LEASES, 10)]
    limiter.admit("long", 100, slots, Amounts(), 0)
    limiter.admit("short", 10, slots, Amounts(), 0)
    assert limiter.renew(["short"], 40, 9) == []
    assert set(limiter.leases) == {"long", "short"}
    limiter.sweep(48)
    assert set(limiter.leases) == {"long", "short"}
    limiter.sweep(49)
    assert set(limiter.leases) == {"long"}
    limiter.sweep(100)
    assert not limiter.leases


def test_a_clock_that_is_set_back_lets_no_rate_wait_for_ever() -> None:
    """A minute of use and one of debt at most, from when it is noticed."""
    limiter = MemoryLimiter()
    ahead_us = NOW_US + 86_400_000_000
    assert limiter.admit("a", 1, [rate(1)], of(1), ahead_us).outcome is Outcome.ADMITTED
    denied = limiter.admit("b", 1, [rate(1)], of(1), NOW_US)
    assert (denied.outcome, denied.wait_us) == (Outcome.DENIED, 2 * MINUTE_US)
    later = limiter.admit("b", 1, [rate(1)], of(1), NOW_US + denied.wait_us)
    assert later.outcome is Outcome.ADMITTED
