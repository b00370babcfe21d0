"""Tests of the limits' arithmetic."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_ratelimit.limiter import (
    MAX_COST,
    MAX_NANO_USD,
    MAX_RATE_LIMIT,
    MINUTE_US,
    NEVER,
    Amounts,
    Charge,
    Kind,
    Measure,
    MemoryLimiter,
    Outcome,
    rate_state,
    spacing,
    window_of,
)

NOW_US = 1_796_000_000_000_000


def rate(limit: int, cost: int = 1) -> Charge:
    return Charge("rate", Kind.RATE, Measure.REQUESTS, limit, cost)


def budget(limit: int, cost: int, kind: Kind = Kind.TOTAL_BUDGET) -> Charge:
    return Charge("budget", kind, Measure.COST, limit, cost)


@given(st.integers(1, 500))
def test_a_rate_lets_exactly_its_limit_through_at_once(limit: int) -> None:
    """No rounding costs or gives a request, whatever the limit."""
    limiter = MemoryLimiter()
    outcomes = [
        limiter.admit(f"lease-{n}", 1, [rate(limit)], NOW_US).outcome for n in range(limit + 3)
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
        admitted += limiter.admit(f"{n}", 1, [rate(limit)], now_us).outcome is Outcome.ADMITTED
    assert admitted * MINUTE_US <= limit * (MINUTE_US + now_us - NOW_US)


@given(st.integers(1, 1000), st.integers(0, 50), st.integers(1, 50))
def test_the_wait_of_a_denial_is_true_to_the_microsecond(limit: int, used: int, cost: int) -> None:
    """After the wait the same request passes; a microsecond earlier it does not."""
    used, cost = min(used, limit), min(cost, limit)
    limiter = MemoryLimiter()
    assert limiter.admit("used", 1, [rate(limit, used)], NOW_US).outcome is Outcome.ADMITTED
    decision = limiter.admit("a", 1, [rate(limit, cost)], NOW_US)
    if decision.outcome is Outcome.DENIED:
        early_us = NOW_US + decision.wait_us - 1
        assert limiter.admit("a", 1, [rate(limit, cost)], early_us).outcome is Outcome.DENIED
        at_us = NOW_US + decision.wait_us
        assert limiter.admit("a", 1, [rate(limit, cost)], at_us).outcome is Outcome.ADMITTED


@given(st.integers(1, 300), st.integers(0, 300), st.integers(0, 300))
def test_settling_with_the_truth_leaves_what_reserving_the_truth_would_have(
    limit: int, reserved: int, used: int
) -> None:
    """Reserve, then correct: the same state as if the estimate had been right."""
    reserved, used = min(reserved, limit), min(used, limit)
    guessed, exact = MemoryLimiter(), MemoryLimiter()
    guessed.admit("a", MINUTE_US, [rate(limit, reserved)], NOW_US)
    guessed.settle("a", Amounts(requests=used), NOW_US)
    exact.admit("a", MINUTE_US, [rate(limit, used)], NOW_US)
    probe = [rate(limit, 0)]
    assert guessed.admit("p", 1, probe, NOW_US).states == exact.admit("p", 1, probe, NOW_US).states


def test_the_largest_numbers_stay_below_2_to_the_53() -> None:
    """The script computes in doubles: its intermediate values must be whole."""
    assert 2 * MAX_COST * MINUTE_US < 2**53 * 2
    assert MAX_COST * MINUTE_US < 2**53
    assert 2 * MAX_RATE_LIMIT < 2**53
    assert MAX_NANO_USD < 2**53


def test_what_is_left_of_a_rate() -> None:
    """Whole requests, rounded down; the reset is when all are there again."""
    assert rate_state(2, *spacing(1, 2)).remaining == 1
    assert rate_state(10, 59_999_999, 0).remaining == 0
    assert rate_state(10, 54_000_000, 0).remaining == 1
    assert rate_state(7, *spacing(7, 7)).reset_us == MINUTE_US
    assert rate_state(5, 90_000_000, 0).remaining == 0


@pytest.mark.parametrize(
    ("kind", "moment", "name", "left_us"),
    [
        (Kind.DAY_BUDGET, datetime(2026, 11, 30, 23, 59, 59, tzinfo=UTC), "20787", 1_000_000),
        (Kind.MONTH_BUDGET, datetime(2026, 11, 30, 23, 59, 59, tzinfo=UTC), "202611", 1_000_000),
        (Kind.MONTH_BUDGET, datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC), "202612", 1_000_000),
        (Kind.MONTH_BUDGET, datetime(2028, 2, 28, tzinfo=UTC), "202802", 2 * 86_400_000_000),
        (Kind.TOTAL_BUDGET, datetime(2028, 2, 28, tzinfo=UTC), "all", 0),
    ],
)
def test_windows_follow_the_calendar(kind: Kind, moment: datetime, name: str, left_us: int) -> None:
    """Days and months in UTC; a total has one window for ever."""
    assert window_of(kind, int(moment.timestamp()) * 1_000_000) == (name, left_us)


def test_a_day_budget_denies_until_midnight_and_a_total_for_ever() -> None:
    """What is spent is spent; a new window is new."""
    midnight_us = NOW_US - NOW_US % 86_400_000_000 + 86_400_000_000
    limiter = MemoryLimiter()
    for kind in (Kind.DAY_BUDGET, Kind.TOTAL_BUDGET):
        limiter.admit(kind.value, MINUTE_US, [budget(10, 10, kind)], NOW_US)
        limiter.settle(kind.value, Amounts(cost_nano_usd=10), NOW_US)
    day = limiter.admit("a", 1, [budget(10, 1, Kind.DAY_BUDGET)], NOW_US)
    total = limiter.admit("a", 1, [budget(10, 1)], NOW_US)
    assert (day.wait_us, total.wait_us) == (midnight_us - NOW_US, NEVER)
    later = limiter.admit("a", 1, [budget(10, 1, Kind.DAY_BUDGET)], midnight_us)
    assert later.outcome is Outcome.ADMITTED


def test_the_cost_goes_to_the_window_of_the_admission() -> None:
    """A request over midnight is yesterday's."""
    midnight_us = NOW_US - NOW_US % 86_400_000_000 + 86_400_000_000
    limiter = MemoryLimiter()
    limiter.admit("a", MINUTE_US, [budget(10, 10, Kind.DAY_BUDGET)], midnight_us - 1)
    limiter.settle("a", Amounts(cost_nano_usd=10), midnight_us + 1)
    left = limiter.admit("b", 1, [budget(10, 0, Kind.DAY_BUDGET)], midnight_us + 1)
    assert left.states[0].remaining == 10
