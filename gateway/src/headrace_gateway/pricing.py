"""What a request may cost and did cost: billing's price table, mirrored.

The ledger computes every amount again from the same table; this one is for the hold and for
comparison. All amounts are whole nano-USD.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_common.price_rows import Level, PriceRow, PriceRows, best_row, cached_tokens
from headrace_contracts.billing.v1.billing_pb2 import PriceTable
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1 import usage_pb2
from headrace_gateway.api_request import ApiRequest, ServiceTier

# flex waits for gaps in the traffic, as batches do.
_TIERS = {
    ServiceTier.DEFAULT: usage_pb2.PRICE_TIER_STANDARD,
    ServiceTier.FLEX: usage_pb2.PRICE_TIER_BATCH,
    ServiceTier.PRIORITY: usage_pb2.PRICE_TIER_PRIORITY,
}


_FREE = PriceRow("")


class PriceBook:
    """The newest price table known."""

    def __init__(self) -> None:
        self._rows = PriceRows()
        # What was found in this second: which rows are in effect changes at whole seconds only.
        self._found: dict[tuple[str, int], Rates] = {}
        self._found_unix_s = 0
        self.version = 0

    @property
    def is_loaded(self) -> bool:
        """Whether any table was seen."""
        return self.version > 0

    def load(self, table: PriceTable) -> None:
        """Take a newer table."""
        self.version = table.version
        self._rows, self._found = PriceRows(map(PriceRow.of, table.prices)), {}

    def find(
        self, model: str, admitted_unix_us: int, tier: int = usage_pb2.PRICE_TIER_STANDARD
    ) -> Rates:
        """Return what prices a request for *model* that was admitted at that moment."""
        second = admitted_unix_us // 1_000_000
        if second != self._found_unix_s:
            self._found, self._found_unix_s = {}, second
        rates = self._found.get((model, tier))
        if rates is None:
            rates = Rates(tuple(self._rows.levels(model, tier, second)))
            self._found[model, tier] = rates
        return rates


@dataclass(frozen=True, slots=True)
class Rates:
    """The rows that may price one request, by level: the first level that has one says it."""

    levels: tuple[Level, ...] = ()

    def of(self, prompt_tokens: int) -> PriceRow | None:
        """Return the row for a prompt of so many tokens, None if no row covers it."""
        return best_row(self.levels, prompt_tokens)

    def up_to(self, prompt_tokens: int) -> Sequence[PriceRow]:
        """Return every row that could price a prompt of at most so many tokens."""
        return [
            row for level in self.levels for row in level if row.from_prompt_tokens <= prompt_tokens
        ]


def price_tier(request: ApiRequest) -> usage_pb2.PriceTier.ValueType:
    """Return at which prices a request that somebody waits for is served."""
    return _TIERS[request.service_tier]


def hold_nano_usd(rates: Rates, prompt_tokens: int, output_tokens: int) -> int:
    """Return the most that a request can cost: nothing cached, every output token made."""
    most = 0
    for row in _reachable(rates, prompt_tokens):
        dearest = max(row.input_nano_usd, row.cached_input_nano_usd, row.cache_write_nano_usd)
        most = max(most, prompt_tokens * dearest + output_tokens * row.output_nano_usd)
    return most


def _reachable(rates: Rates, prompt_tokens: int) -> Sequence[PriceRow]:
    # A request may end with fewer prompt tokens counted than it was admitted with.
    if len(rates.levels) == 1 and len(rates.levels[0]) == 1:
        return rates.up_to(prompt_tokens)
    edges = {0, prompt_tokens, *(row.from_prompt_tokens for row in rates.up_to(prompt_tokens))}
    return [row for edge in sorted(edges) if (row := rates.of(edge)) is not None]


def amount_nano_usd(rates: Rates, usage: TokenUsage) -> int:
    """Return what a request did cost, each class of tokens at its own price."""
    row = rates.of(usage.prompt_tokens) or _FREE
    cached = cached_tokens(usage)
    plain = max(0, usage.prompt_tokens - cached - usage.cache_write_tokens)
    return (
        plain * row.input_nano_usd
        + cached * row.cached_input_nano_usd
        + usage.cache_write_tokens * row.cache_write_nano_usd
        + usage.output_tokens * row.output_nano_usd
    )
