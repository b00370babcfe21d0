"""What a request costs: pure integer arithmetic over immutable price rows.

Which row counts is told by `headrace_common.price_rows`, here and at the gateway.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from headrace_common.price_rows import PriceRow, PriceRows, best_row, cached_tokens
from headrace_contracts.billing.v1 import billing_pb2
from headrace_contracts.types.v1.types_pb2 import TokenUsage

# 1 USD per token. With 32-bit token counts every amount stays inside a signed 64-bit integer.
MAX_NANO_USD_PER_TOKEN = 1_000_000_000


class NoPriceError(Exception):
    """No price row applies."""


class BadUsageError(Exception):
    """Token counts that contradict one another."""


class Amounts(NamedTuple):
    """What each class of tokens costs. Nano-USD."""

    input_nano_usd: int
    cached_input_nano_usd: int
    cache_write_nano_usd: int
    output_nano_usd: int

    @property
    def total_nano_usd(self) -> int:
        """The sum: what the customer owes."""
        return (
            self.input_nano_usd
            + self.cached_input_nano_usd
            + self.cache_write_nano_usd
            + self.output_nano_usd
        )

    def less(self, other: Amounts) -> Amounts:
        """Return the differences."""
        return Amounts(*(a - b for a, b in zip(self, other, strict=True)))


def uncached_tokens(usage: TokenUsage) -> int:
    """Return the prompt tokens that were neither reused nor written to a paid cache.

    Raises:
        BadUsageError: the parts exceed the whole.
    """
    rest = usage.prompt_tokens - cached_tokens(usage) - usage.cache_write_tokens
    if rest < 0:
        raise BadUsageError(
            f"cached {cached_tokens(usage)} + cache write {usage.cache_write_tokens} exceed "
            f"the prompt's {usage.prompt_tokens} tokens"
        )
    return rest


def price_usage(usage: TokenUsage, row: PriceRow) -> Amounts:
    """Price token counts by one row. The four classes are disjoint: no token is paid for twice.

    Raises:
        BadUsageError: the counts contradict one another.
    """
    return Amounts(
        uncached_tokens(usage) * row.input_nano_usd,
        cached_tokens(usage) * row.cached_input_nano_usd,
        usage.cache_write_tokens * row.cache_write_nano_usd,
        usage.output_tokens * row.output_nano_usd,
    )


class PriceBook:
    """All price rows, searchable. Immutable."""

    def __init__(self, rows: Iterable[PriceRow]) -> None:
        self.rows = PriceRows(rows)

    @property
    def version(self) -> int:
        """The newest version; 0 = no prices at all."""
        return self.rows.all[-1].version if self.rows.all else 0

    def find(
        self, model: str, tier: int, version: int, at_unix_s: int, prompt_tokens: int = 0
    ) -> PriceRow:
        """Return the row that prices a request admitted at *at_unix_s* under table *version*.

        Raises:
            NoPriceError: nothing applies.
        """
        row = best_row(self.rows.levels(model, tier, at_unix_s, version), prompt_tokens)
        if row is None:
            raise NoPriceError(f"no price for model {model!r} in version {version} at {at_unix_s}")
        return row

    def to_proto(self) -> billing_pb2.PriceTable:
        """Render the whole table."""
        prices = [row.to_proto() for row in self.rows.all]
        return billing_pb2.PriceTable(version=self.version, prices=prices)
