"""Tests of the estimate of unbounded answers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace_gateway.output_estimate import OutputEstimates


def test_few_answers_say_nothing() -> None:
    """Then the bound itself is reserved."""
    estimates = OutputEstimates()
    for _ in range(39):
        estimates.add("m", 10)
    assert estimates.get("m") is None
    estimates.add("m", 10)
    assert estimates.get("m") in range(10, 13)
    assert estimates.get("other") is None


@given(st.lists(st.integers(1, 900_000), min_size=40, max_size=300))
def test_nineteen_of_twenty_stay_within_and_it_is_not_far_off(lengths: list[int]) -> None:
    """The 95th percentile, rounded up by at most a fifth."""
    estimates = OutputEstimates()
    for length in lengths:
        estimates.add("m", length)
    estimate = estimates.get("m")
    assert estimate is not None
    assert sum(length <= estimate for length in lengths) >= 0.95 * len(lengths)
    exact = sorted(lengths)[-(-95 * len(lengths) // 100) - 1]
    assert estimate <= exact * 1.2 + 1


def test_it_follows_a_model_that_changes() -> None:
    """Old answers count less and less."""
    estimates = OutputEstimates()
    for _ in range(2000):
        estimates.add("m", 1000)
    for _ in range(20_000):
        estimates.add("m", 10)
    assert estimates.get("m") in range(10, 13)
