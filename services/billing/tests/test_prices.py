"""Prices: integers, disjoint classes of tokens, immutable versions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_billing.prices import BadUsageError, NoPriceError, PriceBook, price_usage
from headrace_common.price_rows import PriceRow
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1.usage_pb2 import (
    PRICE_TIER_STANDARD,
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


def test_without_any_row_there_is_no_price() -> None:
    """Nothing is ever free by accident."""
    with pytest.raises(NoPriceError):
        PriceBook([row("m", 3)]).find("m", PRICE_TIER_STANDARD, 2, 0)
    assert PriceBook([]).version == 0
