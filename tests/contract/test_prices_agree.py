"""The gateway prices a request as the ledger does, whatever the table, the moment, the usage."""

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_billing.prices import NoPriceError, PriceBook, price_usage
from headrace_common.price_rows import PriceRow
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_gateway import pricing

DAY_S = 86_400
EDGES = (0, 1, 100, 1000)


@st.composite
def rows(draw: st.DrawFn, version: int) -> PriceRow:
    begin, end = draw(st.sampled_from([(0, 0), (60, 600), (1380, 120), (0, 30)]))
    return PriceRow(
        model=draw(st.sampled_from(["m", "default", "x"])),
        tier=draw(st.sampled_from([1, 2, 3])),
        effective_from_unix_s=draw(st.sampled_from([0, 3 * DAY_S])),
        effective_to_unix_s=draw(st.sampled_from([0, 5 * DAY_S])),
        input_nano_usd=draw(st.integers(0, 50)),
        cached_input_nano_usd=draw(st.integers(0, 50)),
        cache_write_nano_usd=draw(st.integers(0, 50)),
        output_nano_usd=draw(st.integers(0, 50)),
        version=version,
        from_prompt_tokens=draw(st.sampled_from(EDGES)),
        window_from_minute=begin,
        window_to_minute=end,
        window_weekdays=draw(st.sampled_from([0, 0b1, 0b1100, 0b1111111])),
        withdrawn=draw(st.sampled_from([False, False, False, True])),
    )


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_both_price_every_request_alike(data: st.DataObject) -> None:
    """Context tiers, windows, classes of service, withdrawn rows; and the hold covers it."""
    last = data.draw(st.integers(1, 8))
    table = PriceBook([data.draw(rows(version)) for version in range(1, last + 1)])
    at_unix_s = data.draw(st.integers(0, 9 * DAY_S))
    prompt = data.draw(st.sampled_from([*EDGES, 5, 99, 500]))
    cached = data.draw(st.integers(0, prompt))
    usage = TokenUsage(
        prompt_tokens=prompt,
        cached_gpu_tokens=cached,
        cache_write_tokens=data.draw(st.integers(0, prompt - cached)),
        output_tokens=data.draw(st.integers(0, 20)),
    )
    mirror = pricing.PriceBook()
    mirror.load(table.to_proto())
    tier = data.draw(st.sampled_from([1, 2, 3]))
    rates = mirror.find("m", at_unix_s * 1_000_000, tier)
    try:
        row = table.find("m", tier, table.version, at_unix_s, prompt)
    except NoPriceError:
        assert rates.of(prompt) is None
        return
    amount = price_usage(usage, row).total_nano_usd
    assert pricing.amount_nano_usd(rates, usage) == amount
    assert pricing.hold_nano_usd(rates, prompt, 20) >= amount
