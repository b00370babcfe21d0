"""What a request may cost and did cost: billing's price table, mirrored.

The ledger computes every amount again from the same table; this one is for the hold and for
comparison. All amounts are whole nano-USD.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace_common.clock import Clock
from headrace_contracts.billing.v1.billing_pb2 import Price, PriceTable
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1 import usage_pb2
from headrace_gateway.api_request import ApiRequest, ServiceTier

# The table's row for models without one of their own.
_ANY_MODEL = "default"
_FREE = Price()
_STANDARD = int(usage_pb2.PRICE_TIER_STANDARD)
# flex waits for gaps in the traffic, as batches do.
_TIERS = {
    ServiceTier.DEFAULT: usage_pb2.PRICE_TIER_STANDARD,
    ServiceTier.FLEX: usage_pb2.PRICE_TIER_BATCH,
    ServiceTier.PRIORITY: usage_pb2.PRICE_TIER_PRIORITY,
}


class PriceBook:
    """The newest price table known.

    Args:
        clock: for rows that begin or end at a moment.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rows: dict[tuple[str, int], list[Price]] = {}
        self.version = 0

    @property
    def is_loaded(self) -> bool:
        """Whether any table was seen."""
        return self.version > 0

    def load(self, table: PriceTable) -> None:
        """Take a newer table."""
        self.version = table.version
        self._rows = {}
        for row in _newest_first(table.prices):
            self._rows.setdefault((row.model, row.tier or _STANDARD), []).append(row)

    def find(self, model: str, tier: int = _STANDARD) -> Price | None:
        """Return the price of *model* now, None if no row covers it.

        A class of service without a row of its own costs what the standard one does, as in the
        ledger.
        """
        now = self._clock.unix_s()
        for name in (model, _ANY_MODEL):
            for wanted in (tier, _STANDARD):
                for row in self._rows.get((name, wanted), ()):
                    if row.effective_from_unix_s <= now < (row.effective_to_unix_s or now + 1):
                        return row
        return None


def price_tier(request: ApiRequest) -> usage_pb2.PriceTier.ValueType:
    """Return at which prices a request that somebody waits for is served."""
    return _TIERS[request.service_tier]


def hold_nano_usd(price: Price | None, prompt_tokens: int, output_tokens: int) -> int:
    """Return the most that a request can cost: nothing cached, every output token made."""
    row = price or _FREE
    per_input = max(row.input_nano_usd, row.cached_input_nano_usd, row.cache_write_nano_usd)
    return prompt_tokens * per_input + output_tokens * row.output_nano_usd


def cached_tokens(usage: TokenUsage) -> int:
    """Return the prompt tokens whose KV was reused, from any tier."""
    return usage.cached_gpu_tokens + usage.cached_cpu_tokens + usage.cached_disk_tokens


def amount_nano_usd(price: Price | None, usage: TokenUsage) -> int:
    """Return what a request did cost, each class of tokens at its own price."""
    row = price or _FREE
    cached = cached_tokens(usage)
    plain = max(0, usage.prompt_tokens - cached - usage.cache_write_tokens)
    return (
        plain * row.input_nano_usd
        + cached * row.cached_input_nano_usd
        + usage.cache_write_tokens * row.cache_write_nano_usd
        + usage.output_tokens * row.output_nano_usd
    )


def _newest_first(rows: Iterable[Price]) -> list[Price]:
    return sorted(rows, key=lambda row: row.version, reverse=True)
