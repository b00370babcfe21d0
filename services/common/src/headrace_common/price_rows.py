"""Which price row counts: one implementation for the gateway's hold and for the ledger. Pure.

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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TypeAlias

from headrace_contracts.billing.v1.billing_pb2 import Price
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1.usage_pb2 import PRICE_TIER_STANDARD, PriceTier

# The name of the rows for models without one of their own.
ANY_MODEL = "default"
Window: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class PriceRow:
    """One immutable row of the price table. Prices are nano-USD per token."""

    model: str
    tier: int = PRICE_TIER_STANDARD
    effective_from_unix_s: int = 0
    # 0 = open.
    effective_to_unix_s: int = 0
    input_nano_usd: int = 0
    cached_input_nano_usd: int = 0
    cache_write_nano_usd: int = 0
    output_nano_usd: int = 0
    version: int = 0
    # Only for prompts of at least so many tokens.
    from_prompt_tokens: int = 0
    # Window of the day, UTC, [from, to); both 0 = the whole day; from > to = over midnight.
    window_from_minute: int = 0
    window_to_minute: int = 0
    # Days on which the window begins, bit 0 = Monday; 0 = every day.
    window_weekdays: int = 0
    # No price in this place from this version on.
    withdrawn: bool = False

    @classmethod
    def of(cls, told: Price) -> PriceRow:
        """Read a row from its contract message."""
        values = {field.name: getattr(told, field.name) for field in fields(cls)}
        return cls(**{**values, "tier": standard_tier(told.tier)})

    def to_proto(self) -> Price:
        """Render the row as its contract message."""
        return Price(**{**asdict(self), "tier": PriceTier.ValueType(self.tier)})

    @property
    def window(self) -> Window:
        """The window of the day."""
        return (self.window_from_minute, self.window_to_minute, self.window_weekdays)

    @property
    def rank(self) -> tuple[int, bool, int]:
        """What the highest of wins among the rows that fit."""
        return (self.from_prompt_tokens, any(self.window), self.version)

    def in_effect(self, at_unix_s: int) -> bool:
        """Tell whether the row holds at *at_unix_s*, its window of the day included."""
        if at_unix_s < self.effective_from_unix_s:
            return False
        if 0 < self.effective_to_unix_s <= at_unix_s:
            return False
        if not (self.window_from_minute or self.window_to_minute or self.window_weekdays):
            return True
        return _in_window(at_unix_s, *self.window)


# The rows of one name that are in effect, one for each place: what the prompt's length decides.
Level: TypeAlias = Sequence[PriceRow]


class PriceRows:
    """All rows, by name. Immutable."""

    def __init__(self, rows: Iterable[PriceRow] = ()) -> None:
        self.all = tuple(sorted(rows, key=lambda row: row.version))
        self._by_name: dict[tuple[str, int], list[PriceRow]] = {}
        for row in self.all:
            self._by_name.setdefault((row.model, row.tier), []).append(row)

    def levels(
        self, model: str, tier: int, at_unix_s: int, version: int | None = None
    ) -> Iterator[Level]:
        """Yield what may price a request, first match first; of names that have anything.

        Args:
            model: the model that answers.
            tier: class of service; unspecified is standard.
            at_unix_s: when the request was admitted.
            version: of the table that counts; None = the newest.
        """
        for name in (model, ANY_MODEL):
            for wanted in dict.fromkeys((standard_tier(tier), PRICE_TIER_STANDARD)):
                rows = self._by_name.get((name, wanted))
                if rows and (level := _level(rows, at_unix_s, version)):
                    yield level


def best_row(levels: Iterable[Level], prompt_tokens: int) -> PriceRow | None:
    """Return the row for a prompt of so many tokens; None if none covers it."""
    for level in levels:
        rows = [row for row in level if row.from_prompt_tokens <= prompt_tokens]
        if rows:
            return rows[0] if len(rows) == 1 else max(rows, key=lambda row: row.rank)
    return None


def standard_tier(tier: int) -> int:
    """Return *tier*, an unspecified one read as standard."""
    return tier or PRICE_TIER_STANDARD


def cached_tokens(usage: TokenUsage) -> int:
    """Return the prompt tokens whose KV was reused, from any tier."""
    return usage.cached_gpu_tokens + usage.cached_cpu_tokens + usage.cached_disk_tokens


def _level(rows: Sequence[PriceRow], at_unix_s: int, version: int | None) -> Level:
    if len(rows) == 1:
        # As most names have; a booking looks here for each event.
        (row,) = rows
        fits = (version is None or row.version <= version) and row.in_effect(at_unix_s)
        return rows if fits and not row.withdrawn else ()
    newest: dict[tuple[int, Window], PriceRow] = {}
    for row in rows:
        if (version is None or row.version <= version) and row.in_effect(at_unix_s):
            # Rows come in order of version, so the newest of a place stays.
            newest[row.from_prompt_tokens, row.window] = row
    return tuple(row for row in newest.values() if not row.withdrawn)


def _in_window(at_unix_s: int, from_minute: int, to_minute: int, weekdays: int) -> bool:
    # Day 0 of Unix time was a Thursday; bit 0 is Monday.
    weekday, minute = (at_unix_s // 86_400 + 3) % 7, at_unix_s % 86_400 // 60
    if from_minute > to_minute:
        if minute < to_minute:
            weekday = (weekday - 1) % 7
        elif minute < from_minute:
            return False
    elif to_minute and not from_minute <= minute < to_minute:
        return False
    return weekdays == 0 or bool(weekdays >> weekday & 1)
