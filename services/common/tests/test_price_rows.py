"""Which price row counts, wherever it is asked for."""

import pytest

from headrace_common.price_rows import PriceRow, PriceRows, best_row
from headrace_contracts.usage.v1.usage_pb2 import (
    PRICE_TIER_BATCH,
    PRICE_TIER_PRIORITY,
    PRICE_TIER_STANDARD,
    PRICE_TIER_UNSPECIFIED,
)


def row(model: str = "m", version: int = 1, **changes: int) -> PriceRow:
    return PriceRow(model, version=version, **{"input_nano_usd": 20, **changes})


def cost(
    known: PriceRows, model: str, tier: int, version: int, at_unix_s: int, prompt_tokens: int = 0
) -> int:
    """What a prompt token costs under a table of that version."""
    found = best_row(known.levels(model, tier, at_unix_s, version), prompt_tokens)
    assert found is not None
    return found.input_nano_usd


def test_a_coming_price_waits_for_its_time() -> None:
    """A row counts from its first second until just before its last."""
    known = PriceRows(
        [
            row(version=1),
            row(version=2, input_nano_usd=5, effective_from_unix_s=100, effective_to_unix_s=200),
        ]
    )
    found = [cost(known, "m", PRICE_TIER_STANDARD, 2, at) for at in (99, 100, 199, 200)]
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
    known = PriceRows([row(), row(version=2, input_nano_usd=5, **night, window_weekdays=1 << 4)])
    at = FRIDAY_UNIX_S + day * 86_400 + minute * 60
    assert cost(known, "m", PRICE_TIER_STANDARD, 2, at) == price


def test_the_highest_context_tier_reached_counts_until_it_is_withdrawn() -> None:
    """A withdrawn row gives way to the tier below, for requests admitted after it."""
    known = PriceRows(
        [
            row(),
            row(version=2, input_nano_usd=30, from_prompt_tokens=1000),
            row(version=3, input_nano_usd=40, from_prompt_tokens=5000),
            row(version=4, from_prompt_tokens=5000, withdrawn=True),
        ]
    )

    def price(version: int, prompt_tokens: int) -> int:
        return cost(known, "m", PRICE_TIER_STANDARD, version, 0, prompt_tokens)

    assert [price(3, it) for it in (999, 1000, 4999, 5000)] == [20, 30, 30, 40]
    assert [price(4, it) for it in (999, 1000, 4999, 5000)] == [20, 30, 30, 30]


def test_an_unknown_model_costs_the_default_price() -> None:
    """A row of the model wins over the default, whatever the version."""
    known = PriceRows([row("m", 1), row("default", 2, input_nano_usd=7)])
    assert cost(known, "other", PRICE_TIER_STANDARD, 2, 0) == 7
    assert cost(known, "m", PRICE_TIER_STANDARD, 2, 0) == 20


def test_a_tier_without_a_price_costs_the_standard_one() -> None:
    """An unspecified tier is the standard one."""
    known = PriceRows([row("m", 1), row("m", 1, tier=PRICE_TIER_BATCH, input_nano_usd=10)])
    tiers = (PRICE_TIER_UNSPECIFIED, PRICE_TIER_BATCH, PRICE_TIER_PRIORITY)
    assert [cost(known, "m", tier, 1, 0) for tier in tiers] == [20, 10, 20]


def test_a_row_survives_its_contract_message() -> None:
    """No field is lost on the way out, nor on the way back."""
    amounts = {f"{name}_nano_usd": 1 for name in ("cached_input", "cache_write", "output")}
    window = {"window_from_minute": 5, "window_to_minute": 9, "window_weekdays": 3}
    times = {"effective_from_unix_s": 3, "effective_to_unix_s": 9}
    told = row(version=4, from_prompt_tokens=7, withdrawn=True, **amounts, **times, **window)
    price = told.to_proto()
    assert all(getattr(price, field.name) for field in price.DESCRIPTOR.fields)
    assert PriceRow.of(price) == told
