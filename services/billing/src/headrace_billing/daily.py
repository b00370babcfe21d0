"""Usage summed by day and by what a tenant splits its bill by: pure.

The day, UTC, is that of the request's admission, as its price is. The sums are derived: `verify`
recounts them from the events.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import add

from headrace_billing.prices import Amounts, uncached_tokens
from headrace_common.price_rows import cached_tokens, standard_tier
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent

SECONDS_PER_DAY = 86_400
# Tenant, first second of the day, project, key, model, tier.
DayKey = tuple[str, int, str, str, str, int]
KEY_NAMES = ("tenant_id", "day_unix_s", "project_id", "key_id", "model", "tier")
CLASSES = ("input", "cached_input", "cache_write", "output")
SUM_NAMES = (
    "num_requests",
    *(f"{name}_tokens" for name in CLASSES),
    *(f"{name}_nano_usd" for name in CLASSES),
)


def counts_of(closed: UsageEvent) -> tuple[int, int, int, int]:
    """Return the tokens by class; of a correction, how many more than were booked before."""
    counts = _counts(closed.usage)
    if not closed.HasField("replaces"):
        return counts
    before = _counts(closed.replaces)
    return (
        counts[0] - before[0],
        counts[1] - before[1],
        counts[2] - before[2],
        counts[3] - before[3],
    )


def _counts(usage: TokenUsage) -> tuple[int, int, int, int]:
    return (
        uncached_tokens(usage),
        cached_tokens(usage),
        usage.cache_write_tokens,
        usage.output_tokens,
    )


def day_of(unix_s: int) -> int:
    """Return the first second of the day."""
    return unix_s - unix_s % SECONDS_PER_DAY


@dataclass
class DailySums:
    """Sums by key; each value is one number per name of `SUM_NAMES`."""

    sums: dict[DayKey, list[int]] = field(default_factory=dict)

    def add(self, closed: UsageEvent, admitted_unix_s: int, amounts: Amounts) -> None:
        """Add one closed request, or the difference that a correction makes."""
        key = (
            closed.tenant_id,
            day_of(admitted_unix_s),
            closed.project_id,
            closed.key_id,
            closed.model,
            standard_tier(closed.price_tier),
        )
        counts = counts_of(closed)
        values = (
            closed.moved_requests if closed.HasField("replaces") else 1,
            *counts,
            amounts.input_nano_usd,
            amounts.cached_input_nano_usd,
            amounts.cache_write_nano_usd,
            amounts.output_nano_usd,
        )
        before = self.sums.get(key)
        self.sums[key] = list(values) if before is None else list(map(add, before, values))

    def merge(self, other: DailySums) -> None:
        """Add all of *other*."""
        for key, values in other.sums.items():
            before = self.sums.get(key, [0] * len(values))
            self.sums[key] = [a + b for a, b in zip(before, values, strict=True)]

    def values(self) -> Iterator[tuple[str | int, ...]]:
        """Yield the rows of the table as they lie in it, in order of keys."""
        for key in sorted(self.sums):
            yield (*key, *self.sums[key])

    def rows(self) -> Iterator[Mapping[str, str | int]]:
        """Yield the rows of the table, in order of keys."""
        for key in sorted(self.sums):
            yield {
                **dict(zip(KEY_NAMES, key, strict=True)),
                **dict(zip(SUM_NAMES, self.sums[key], strict=True)),
            }
