"""Tests of what answers say about limits."""

from __future__ import annotations

import pytest

from headrace_gateway.limit_states import Standing
from headrace_gateway.rate_headers import duration_text, header_pairs, is_limit_header

State = tuple[tuple[int, int, int], int, int]


def state(
    *, dimension: int, limit: int, remaining: int, level: int = 0, reset_us: int = 0
) -> State:
    """A limit, by the contract's numbers, what remains of it and when it is whole again."""
    return (level, dimension, limit), remaining, reset_us


def standing(*states: State) -> Standing:
    """How these limits stand, all together."""
    limits, remaining, reset_us = zip(*states, strict=True)
    return Standing(limits, remaining, reset_us)


def test_headers_tell_the_tightest_limit() -> None:
    """Of key, project and tenant the one with the least left."""
    states = [
        state(dimension=1, limit=10, remaining=9, reset_us=6_000_000),
        state(dimension=1, limit=5, remaining=4, reset_us=12_000_000),
        state(dimension=4, limit=1000, remaining=900, reset_us=1),
        state(dimension=6, limit=2, remaining=1),
    ]
    pairs = {
        name: value for name, value in header_pairs(standing(*states)) if name.startswith("x-")
    }
    assert pairs == {
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "4",
        "x-ratelimit-reset-requests": "12s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "900",
        "x-ratelimit-reset-tokens": "1ms",
    }
    assert header_pairs(Standing()) == []


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


def test_the_ietf_fields_list_every_limit_by_a_name_of_its_own() -> None:
    """Structured fields: strings with integer parameters; the same names in both."""
    states = [
        state(level=1, dimension=1, limit=10, remaining=9, reset_us=6_000_001),
        state(level=3, dimension=3, limit=10**12, remaining=500, reset_us=30_000_000),
        state(level=4, dimension=5, limit=100, remaining=0, reset_us=3_600_000_000),
        state(level=2, dimension=6, limit=4, remaining=3),
    ]
    pairs = dict(header_pairs(standing(*states)))
    assert pairs["ratelimit-policy"] == (
        '"key-requests-per-minute";q=10;qu="requests";w=60, '
        '"organization-output-tokens-per-minute";q=1000000000000;qu="tokens";w=60, '
        '"model-requests-per-day";q=100;qu="requests";w=86400, '
        '"project-concurrent-requests";q=4;qu="concurrent-requests"'
    )
    assert pairs["ratelimit"] == (
        '"key-requests-per-minute";r=9;t=7, '
        '"organization-output-tokens-per-minute";r=500;t=30, '
        '"model-requests-per-day";r=0;t=3600, '
        '"project-concurrent-requests";r=3'
    )
    assert all(is_limit_header(name) for name in pairs)
    assert not is_limit_header("x-request-id")


def test_money_is_not_told() -> None:
    """A budget is between the tenant and billing."""
    assert header_pairs(standing(state(level=1, dimension=9, limit=10, remaining=9))) == []
