"""Holds and amounts in whole nano-USD."""

from __future__ import annotations

from headrace_common.price_rows import PriceRow
from headrace_contracts.billing.v1.billing_pb2 import Price, PriceTable
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_gateway.pricing import PriceBook, Rates, amount_nano_usd, hold_nano_usd


def price(model: str = "m", **fields: int) -> Price:
    return Price(model=model, **fields)  # type: ignore[arg-type]


def book(*rows: Price) -> PriceBook:
    made = PriceBook()
    made.load(PriceTable(version=9, prices=rows))
    return made


def test_every_class_of_tokens_has_its_price() -> None:
    """Cached, written, plain and output tokens are disjoint."""
    row = price(
        input_nano_usd=20, cached_input_nano_usd=2, cache_write_nano_usd=25, output_nano_usd=60
    )
    usage = TokenUsage(
        prompt_tokens=100,
        cached_gpu_tokens=30,
        cached_cpu_tokens=10,
        cached_disk_tokens=5,
        cache_write_tokens=15,
        output_tokens=7,
    )
    rates = Rates(((PriceRow.of(row),),))
    assert amount_nano_usd(rates, usage) == 40 * 20 + 45 * 2 + 15 * 25 + 7 * 60
    assert amount_nano_usd(Rates(), usage) == 0


def test_the_hold_covers_every_outcome() -> None:
    """No usage within the bounds can cost more than was held."""
    row = price(
        input_nano_usd=20, cached_input_nano_usd=2, cache_write_nano_usd=25, output_nano_usd=60
    )
    usage = TokenUsage(prompt_tokens=10, cache_write_tokens=10, output_tokens=5)
    rates = Rates(((PriceRow.of(row),),))
    assert hold_nano_usd(rates, 10, 5) == amount_nano_usd(rates, usage)


def test_the_newest_row_in_effect_counts() -> None:
    """Later versions win once they are in effect; ended ones do not count."""
    now = 1_800_000_000
    prices = book(
        price(version=1, input_nano_usd=1),
        price(version=2, input_nano_usd=2, effective_from_unix_s=now + 10),
        price(version=3, input_nano_usd=3, effective_to_unix_s=now),
        price(version=4, input_nano_usd=4, tier=2),
        price("default", version=5, input_nano_usd=5),
    )
    found = prices.find("m", now * 1_000_000 + 999_999).of(1)
    assert found is not None
    assert found.version == 1
    later = price(version=2, input_nano_usd=2, effective_from_unix_s=now + 10)
    assert prices.find("m", (now + 10) * 1_000_000).of(1) == PriceRow.of(later)


def test_models_without_a_row_cost_the_default() -> None:
    """And without a default nothing covers them."""
    found = book(price("default", version=5, input_nano_usd=5)).find("other", 0).of(1)
    assert found is not None
    assert found.input_nano_usd == 5
    assert book().find("other", 0).of(1) is None
