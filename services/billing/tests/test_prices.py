"""Prices: integers, disjoint classes of tokens, immutable versions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_billing.prices import BadUsageError, NoPriceError, PriceBook, price_usage
from headrace_common.price_rows import PriceRow
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1.usage_pb2 import (
    PRICE_TIER_BATCH,
    PRICE_TIER_PRIORITY,
    PRICE_TIER_STANDARD,
    PRICE_TIER_UNSPECIFIED,
)

UINT32 = st.integers(0, 2**32 - 1)


def row(model: str = "m", version: int = 1, **changes: int) -> PriceRow:
    values = {
        "tier": PRICE_TIER_STANDARD,
        "effective_from_unix_s": 0,
        "effective_to_unix_s": 0,
        "input_nano_usd": 20,
        "cached_input_nano_usd": 2,
        "cache_write_nano_usd": 25,
        "output_nano_usd": 60,
    }
    return PriceRow(model=model, version=version, **{**values, **changes})


def test_each_class_of_tokens_has_its_own_price() -> None:
    """Cached tokens of all tiers cost the cached price, the rest of the prompt the input price."""
    usage = TokenUsage(
        prompt_tokens=100,
        cached_gpu_tokens=10,
        cached_cpu_tokens=20,
        cached_disk_tokens=5,
        cache_write_tokens=15,
        output_tokens=7,
        reasoning_tokens=3,
    )
    amounts = price_usage(usage, row())
    assert amounts.input_nano_usd == 50 * 20
    assert amounts.cached_input_nano_usd == 35 * 2
    assert amounts.cache_write_nano_usd == 15 * 25
    assert amounts.output_nano_usd == 7 * 60
    assert amounts.total_nano_usd == 1000 + 70 + 375 + 420


def test_more_cached_than_prompt_tokens_cannot_be_priced() -> None:
    """The parts of a prompt never exceed the whole."""
    usage = TokenUsage(prompt_tokens=10, cached_gpu_tokens=6, cache_write_tokens=5)
    with pytest.raises(BadUsageError, match="exceed the prompt's 10"):
        price_usage(usage, row())


@given(prompt=UINT32, output=UINT32, shares=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_no_token_is_priced_twice_and_none_is_free(
    prompt: int, output: int, shares: tuple[float, float]
) -> None:
    """With one price for everything the split does not matter, and 64 bits are enough."""
    cached = int(prompt * shares[0])
    write = int((prompt - cached) * shares[1])
    usage = TokenUsage(
        prompt_tokens=prompt,
        cached_cpu_tokens=cached,
        cache_write_tokens=write,
        output_tokens=output,
    )
    dearest = 1_000_000_000
    same = row(
        input_nano_usd=dearest,
        cached_input_nano_usd=dearest,
        cache_write_nano_usd=dearest,
        output_nano_usd=dearest,
    )
    total = price_usage(usage, same).total_nano_usd
    assert total == (prompt + output) * dearest
    assert total < 2**63


def test_a_price_set_later_does_not_touch_a_request_admitted_before() -> None:
    """The version at admission decides."""
    book = PriceBook([row(version=1), row(version=2, input_nano_usd=99)])
    assert book.find("m", PRICE_TIER_STANDARD, 1, 100).input_nano_usd == 20
    assert book.find("m", PRICE_TIER_STANDARD, 2, 100).input_nano_usd == 99
    assert book.version == 2


def test_a_coming_price_waits_for_its_time() -> None:
    """A row counts from its first second until just before its last."""
    book = PriceBook(
        [
            row(version=1),
            row(version=2, input_nano_usd=5, effective_from_unix_s=100, effective_to_unix_s=200),
        ]
    )
    found = [
        book.find("m", PRICE_TIER_STANDARD, 2, at).input_nano_usd for at in (99, 100, 199, 200)
    ]
    assert found == [20, 5, 5, 20]


# 2026-10-16 is a Friday.
FRIDAY_UNIX_S = 1_792_108_800


@pytest.mark.parametrize(
    ("day", "minute", "price"),
    [
        (0, 21 * 60 + 59, 20),  # Friday, before the window
        (0, 22 * 60, 5),  # its first minute
        (1, 5 * 60 + 59, 5),  # the night of Friday to Saturday is Friday's
        (1, 6 * 60, 20),
        (1, 22 * 60, 20),  # Saturday begins none
        (0, 3 * 60, 20),  # the night before was Thursday's
    ],
)
def test_a_window_over_midnight_belongs_to_the_day_it_begins_on(
    day: int, minute: int, price: int
) -> None:
    """Fridays, 22:00 to 6:00 UTC, at another price."""
    night = {"window_from_minute": 22 * 60, "window_to_minute": 6 * 60}
    book = PriceBook([row(), row(version=2, input_nano_usd=5, **night, window_weekdays=1 << 4)])
    at = FRIDAY_UNIX_S + day * 86_400 + minute * 60
    assert book.find("m", PRICE_TIER_STANDARD, 2, at).input_nano_usd == price


def test_the_highest_context_tier_reached_counts_until_it_is_withdrawn() -> None:
    """A withdrawn row gives way to the tier below, for requests admitted after it."""
    book = PriceBook(
        [
            row(),
            row(version=2, input_nano_usd=30, from_prompt_tokens=1000),
            row(version=3, input_nano_usd=40, from_prompt_tokens=5000),
            row(version=4, from_prompt_tokens=5000, withdrawn=True),
        ]
    )

    def price(version: int, prompt_tokens: int) -> int:
        found = book.find("m", PRICE_TIER_STANDARD, version, 0, prompt_tokens)
        return found.input_nano_usd

    assert [price(3, it) for it in (999, 1000, 4999, 5000)] == [20, 30, 30, 40]
    assert [price(4, it) for it in (999, 1000, 4999, 5000)] == [20, 30, 30, 30]


def test_an_unknown_model_costs_the_default_price() -> None:
    """A row of the model wins over the default, whatever the version."""
    book = PriceBook([row("m", 1), row("default", 2, input_nano_usd=7)])
    assert book.find("other", PRICE_TIER_STANDARD, 2, 0).input_nano_usd == 7
    assert book.find("m", PRICE_TIER_STANDARD, 2, 0).input_nano_usd == 20


def test_a_tier_without_a_price_costs_the_standard_one() -> None:
    """An unspecified tier is the standard one."""
    book = PriceBook([row("m", 1), row("m", 1, tier=PRICE_TIER_BATCH, input_nano_usd=10)])
    tiers = (PRICE_TIER_UNSPECIFIED, PRICE_TIER_BATCH, PRICE_TIER_PRIORITY)
    assert [book.find("m", tier, 1, 0).input_nano_usd for tier in tiers] == [20, 10, 20]


def test_without_any_row_there_is_no_price() -> None:
    """Nothing is ever free by accident."""
    with pytest.raises(NoPriceError):
        PriceBook([row("m", 3)]).find("m", PRICE_TIER_STANDARD, 2, 0)
    assert PriceBook([]).version == 0


def test_a_row_survives_its_contract_message() -> None:
    """No field is lost on the way out."""
    window = {"window_from_minute": 5, "window_to_minute": 9, "window_weekdays": 3}
    times = {"effective_from_unix_s": 3, "effective_to_unix_s": 9}
    price = row(version=4, from_prompt_tokens=7, withdrawn=True, **times, **window).to_proto()
    assert all(getattr(price, field.name) for field in price.DESCRIPTOR.fields)
