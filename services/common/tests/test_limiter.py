"""Tests of the limits' arithmetic."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from headrace_common.limits.limiter import (
    MAX_COST,
    MAX_NANO_USD,
    MAX_RATE_LIMIT,
    MINUTE_US,
    Amounts,
    Kind,
    Measure,
    rate_state,
    spacing,
    window_of,
)


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
    now_us = int(moment.timestamp()) * 1_000_000
    window = window_of(kind, now_us)
    assert (window.name, window.left_us(now_us)) == (name, left_us)
    assert window == window_of(kind, window.from_us)


def test_cached_input_is_free_of_the_input_limit_only() -> None:
    """Where the plan says so; all tokens are all tokens."""
    amounts = Amounts(input_tokens=100, output_tokens=7, cached_input_tokens=60)
    assert amounts.of(Measure.INPUT_TOKENS) == 40
    assert amounts.of(Measure.TOKENS) == 107
