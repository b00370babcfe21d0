"""What a request may cost and did cost: billing's price table, mirrored.

The ledger computes every amount again from the same table; this one is for the hold and for
comparison. All amounts are whole nano-USD.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

from headrace_common.clock import Clock
from headrace_contracts.billing.v1.billing_pb2 import Price, PriceTable
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1 import usage_pb2
from headrace_gateway.api_request import ApiRequest, ServiceTier

# The table's row for models without one of their own.
_ANY_MODEL = "default"
_STANDARD = int(usage_pb2.PRICE_TIER_STANDARD)
# flex waits for gaps in the traffic, as batches do.
_TIERS = {
    ServiceTier.DEFAULT: usage_pb2.PRICE_TIER_STANDARD,
    ServiceTier.FLEX: usage_pb2.PRICE_TIER_BATCH,
    ServiceTier.PRIORITY: usage_pb2.PRICE_TIER_PRIORITY,
}


@dataclass(frozen=True, slots=True)
class Row:
    """A `billing.v1.Price`, in values that cost nothing to read; its contract says the rest."""

    model: str = ""
    tier: int = 0
    effective_from_unix_s: int = 0
    effective_to_unix_s: int = 0
    input_nano_usd: int = 0
    cached_input_nano_usd: int = 0
    cache_write_nano_usd: int = 0
    output_nano_usd: int = 0
    version: int = 0
    from_prompt_tokens: int = 0
    window_from_minute: int = 0
    window_to_minute: int = 0
    window_weekdays: int = 0
    withdrawn: bool = False

    @classmethod
    def of(cls, told: Price) -> Row:
        """Take what billing told."""
        return cls(**{field.name: getattr(told, field.name) for field in fields(cls)})


_FREE = Row()


class PriceBook:
    """The newest price table known.

    Args:
        clock: for rows that begin or end at a moment.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rows: dict[tuple[str, int], list[Row]] = {}
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
        self._rows, self._found = {}, {}
        for row in _newest_first(map(Row.of, table.prices)):
            self._rows.setdefault((row.model, row.tier or _STANDARD), []).append(row)

    def find(self, model: str, tier: int = _STANDARD) -> Rates:
        """Return what prices a request for *model* that is admitted now.

        A class of service without a row of its own costs what the standard one does, as in the
        ledger (`headrace_billing.prices` says how a row is chosen).
        """
        now = int(self._clock.unix_s())
        if now != self._found_unix_s:
            self._found, self._found_unix_s = {}, now
        rates = self._found.get((model, tier))
        if rates is None:
            rates = self._found[model, tier] = self._find(model, tier, now)
        return rates

    def _find(self, model: str, tier: int, now: int) -> Rates:
        levels = []
        for name in (model, _ANY_MODEL):
            for wanted in dict.fromkeys((tier, _STANDARD)):
                places = dict[tuple[int, _Window], Row]()
                for row in self._rows.get((name, wanted), ()):
                    if _in_effect(row, now):
                        # Newest first, so the first of a place stays.
                        places.setdefault((row.from_prompt_tokens, _window(row)), row)
                levels.append(tuple(row for row in places.values() if not row.withdrawn))
        return Rates(tuple(level for level in levels if level))


_Window: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Rates:
    """The rows that may price one request, by level: the first level that has one says it."""

    levels: tuple[tuple[Row, ...], ...] = ()

    def of(self, prompt_tokens: int) -> Row | None:
        """Return the row for a prompt of so many tokens, None if no row covers it."""
        for level in self.levels:
            if len(level) == 1 and not level[0].from_prompt_tokens:
                return level[0]
            rows = [row for row in level if row.from_prompt_tokens <= prompt_tokens]
            if rows:
                return max(rows, key=_rank)
        return None

    def up_to(self, prompt_tokens: int) -> Sequence[Row]:
        """Return every row that could price a prompt of at most so many tokens."""
        return [
            row for level in self.levels for row in level if row.from_prompt_tokens <= prompt_tokens
        ]


def price_tier(request: ApiRequest) -> usage_pb2.PriceTier.ValueType:
    """Return at which prices a request that somebody waits for is served."""
    return _TIERS[request.service_tier]


def _rank(row: Row) -> tuple[int, bool, int]:
    return (row.from_prompt_tokens, any(_window(row)), row.version)


def _window(row: Row) -> _Window:
    return (row.window_from_minute, row.window_to_minute, row.window_weekdays)


def _in_effect(row: Row, now: int) -> bool:
    if now < row.effective_from_unix_s or 0 < row.effective_to_unix_s <= now:
        return False
    # Day 0 of Unix time was a Thursday; bit 0 is Monday.
    weekday, minute = (now // 86_400 + 3) % 7, now % 86_400 // 60
    begin, end, weekdays = _window(row)
    if begin > end:
        if minute < end:
            weekday = (weekday - 1) % 7
        elif minute < begin:
            return False
    elif end and not begin <= minute < end:
        return False
    return weekdays == 0 or bool(weekdays >> weekday & 1)


def hold_nano_usd(rates: Rates, prompt_tokens: int, output_tokens: int) -> int:
    """Return the most that a request can cost: nothing cached, every output token made."""
    most = 0
    for row in _reachable(rates, prompt_tokens):
        dearest = max(row.input_nano_usd, row.cached_input_nano_usd, row.cache_write_nano_usd)
        most = max(most, prompt_tokens * dearest + output_tokens * row.output_nano_usd)
    return most


def _reachable(rates: Rates, prompt_tokens: int) -> Sequence[Row]:
    # A request may end with fewer prompt tokens counted than it was admitted with.
    if len(rates.levels) == 1 and len(rates.levels[0]) == 1:
        return rates.up_to(prompt_tokens)
    edges = {0, prompt_tokens, *(row.from_prompt_tokens for row in rates.up_to(prompt_tokens))}
    return [row for edge in sorted(edges) if (row := rates.of(edge)) is not None]


def cached_tokens(usage: TokenUsage) -> int:
    """Return the prompt tokens whose KV was reused, from any tier."""
    return usage.cached_gpu_tokens + usage.cached_cpu_tokens + usage.cached_disk_tokens


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


def _newest_first(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.version, reverse=True)
