"""What a request costs: pure integer arithmetic over immutable price rows.

Every row carries the version of the price table that brought it. A request is priced by the table
as it was when the request was admitted: rows of later versions are not seen. A price set today
never touches a request under way.

Choice of the row, first match wins: (model, tier), (model, standard), ("default", tier),
("default", standard). Among the rows of one such name those are looked at that are in effect at the
moment of admission, whose window of the day holds it and whose context tier the prompt reaches; the
highest context tier wins, then a row with a window over one without, then the newest version. A
withdrawn row takes its place (context tier and window) out of the choice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace_contracts.billing.v1 import billing_pb2
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1 import usage_pb2

DEFAULT_MODEL = "default"
STANDARD = usage_pb2.PRICE_TIER_STANDARD
# 1 USD per token. With 32-bit token counts every amount stays inside a signed 64-bit integer.
MAX_NANO_USD_PER_TOKEN = 1_000_000_000


class NoPriceError(Exception):
    """No price row applies."""


class BadUsageError(Exception):
    """Token counts that contradict one another."""


@dataclass(frozen=True)
class PriceRow:
    """One immutable row of the price table. Prices are nano-USD per token."""

    model: str
    tier: int
    effective_from_unix_s: int
    # 0 = open.
    effective_to_unix_s: int
    input_nano_usd: int
    cached_input_nano_usd: int
    cache_write_nano_usd: int
    output_nano_usd: int
    version: int
    # Only for prompts of at least so many tokens.
    from_prompt_tokens: int = 0
    # Window of the day, UTC, [from, to); both 0 = the whole day; from > to = over midnight.
    window_from_minute: int = 0
    window_to_minute: int = 0
    # Days on which the window begins, bit 0 = Monday; 0 = every day.
    window_weekdays: int = 0
    # No price in this place from this version on.
    withdrawn: bool = False

    @property
    def window(self) -> tuple[int, int, int]:
        """The window of the day."""
        return (self.window_from_minute, self.window_to_minute, self.window_weekdays)

    def in_effect(self, at_unix_s: int) -> bool:
        """Tell whether the row holds at *at_unix_s*, its window of the day included."""
        if at_unix_s < self.effective_from_unix_s:
            return False
        if 0 < self.effective_to_unix_s <= at_unix_s:
            return False
        if not (self.window_from_minute or self.window_to_minute or self.window_weekdays):
            return True
        return _in_window(at_unix_s, *self.window)


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


def standard_tier(tier: int) -> int:
    """Return *tier*, an unspecified one read as standard."""
    return tier or STANDARD


def cached_tokens(usage: TokenUsage) -> int:
    """Return the prompt tokens whose KV was reused, from any tier."""
    return usage.cached_gpu_tokens + usage.cached_cpu_tokens + usage.cached_disk_tokens


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
        self.rows = tuple(sorted(rows, key=lambda row: row.version))
        self._by_name: dict[tuple[str, int], list[PriceRow]] = {}
        for row in self.rows:
            self._by_name.setdefault((row.model, row.tier), []).append(row)

    @property
    def version(self) -> int:
        """The newest version; 0 = no prices at all."""
        return self.rows[-1].version if self.rows else 0

    def find(
        self, model: str, tier: int, version: int, at_unix_s: int, prompt_tokens: int = 0
    ) -> PriceRow:
        """Return the row that prices a request admitted at *at_unix_s* under table *version*.

        Raises:
            NoPriceError: nothing applies.
        """
        tier = standard_tier(tier)
        for name in (model, DEFAULT_MODEL):
            for wanted in (tier, STANDARD):
                rows = self._by_name.get((name, wanted))
                if rows is None:
                    continue
                found = _choose(rows, version, at_unix_s, prompt_tokens)
                if found is not None:
                    return found
        raise NoPriceError(f"no price for model {model!r} in version {version} at {at_unix_s}")


def _choose(
    rows: Sequence[PriceRow], version: int, at_unix_s: int, prompt_tokens: int
) -> PriceRow | None:
    if len(rows) == 1:
        (row,) = rows
        fits = row.version <= version and row.from_prompt_tokens <= prompt_tokens
        return row if fits and not row.withdrawn and row.in_effect(at_unix_s) else None
    newest: dict[tuple[int, tuple[int, int, int]], PriceRow] = {}
    for row in rows:
        if (
            row.version <= version
            and row.from_prompt_tokens <= prompt_tokens
            and row.in_effect(at_unix_s)
        ):
            # Rows come in order of version, so the newest of a place stays.
            newest[row.from_prompt_tokens, row.window] = row
    return max(
        (row for row in newest.values() if not row.withdrawn),
        key=lambda row: (row.from_prompt_tokens, any(row.window), row.version),
        default=None,
    )


def _in_window(at_unix_s: int, from_minute: int, to_minute: int, weekdays: int) -> bool:
    # Day 0 of Unix time was a Thursday.
    weekday, minute = (at_unix_s // 86_400 + 3) % 7, at_unix_s % 86_400 // 60
    if from_minute > to_minute:
        if minute < to_minute:
            weekday = (weekday - 1) % 7
        elif minute < from_minute:
            return False
    elif to_minute and not from_minute <= minute < to_minute:
        return False
    return weekdays == 0 or bool(weekdays >> weekday & 1)


def row_to_proto(row: PriceRow) -> billing_pb2.Price:
    """Render a row as its contract message."""
    fields = dataclasses.asdict(row)
    return billing_pb2.Price(**{**fields, "tier": usage_pb2.PriceTier.ValueType(row.tier)})


def table_to_proto(book: PriceBook) -> billing_pb2.PriceTable:
    """Render the whole table."""
    return billing_pb2.PriceTable(
        version=book.version, prices=[row_to_proto(row) for row in book.rows]
    )
