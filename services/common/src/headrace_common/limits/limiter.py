"""The arithmetic of all limits, in whole numbers. Pure: time is an argument.

Rates are GCRA (generic cell rate algorithm, ITU-T I.371, the virtual scheduling form) with a burst
of one minute's limit: a key's theoretical arrival time (TAT) says until when it has used up its
rate; a request moves it on by ``cost / limit`` minutes and passes if it stays within a minute from
now. TAT is kept exactly, as microseconds and a rest in 1/limit of a microsecond, so that a limit of
7 lets exactly 7 through and no rounding adds up.

Day, month and total are windows (UTC): a budget must run out, and a rate never does. A budget
counts what is spent and what is held by requests under way.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import NamedTuple

MINUTE_US = 60_000_000
DAY_US = 86_400_000_000
# How far actual use above the reservation may push a rate into debt, beyond a full minute.
MAX_DEBT_US = MINUTE_US
# When only leases or holds of others are in the way, nobody knows when they end: ask again then.
POLL_US = 1_000_000
# Waiting does not help.
NEVER = -1

# Largest values for which the script's numbers (doubles) stay whole: cost * MINUTE_US and
# spent + held + cost below 2**53.
MAX_COST = 100_000_000
MAX_RATE_LIMIT = 1_000_000_000_000
MAX_NANO_USD = 9_000_000_000_000_000

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Kind(Enum):
    """How a dimension is counted. The values are the script's: budgets come last."""

    RATE = 1
    DAY_COUNT = 2
    SLOTS = 3
    DAY_BUDGET = 4
    MONTH_BUDGET = 5
    TOTAL_BUDGET = 6

    @property
    def is_budget(self) -> bool:
        """Whether it counts money."""
        return self in (Kind.DAY_BUDGET, Kind.MONTH_BUDGET, Kind.TOTAL_BUDGET)


class Measure(Enum):
    """Which amount of a request a dimension counts. The values are places in `Amounts.measures`."""

    REQUESTS = 1
    INPUT_TOKENS = 2
    OUTPUT_TOKENS = 3
    TOKENS = 4
    COST = 5
    LEASES = 6


class Amounts(NamedTuple):
    """What a request reserves or has used."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_nano_usd: int = 0
    # Of the input tokens, those that the limit of input tokens does not count.
    cached_input_tokens: int = 0

    @property
    def measures(self) -> tuple[int, int, int, int, int, int]:
        """The amounts in the order of `Measure`, as the script takes them."""
        return (
            self.requests,
            self.input_tokens - self.cached_input_tokens,
            self.output_tokens,
            self.input_tokens + self.output_tokens,
            self.cost_nano_usd,
            1,
        )

    def of(self, measure: Measure) -> int:
        """Return the amount that *measure* names."""
        return self.measures[measure.value - 1]


@dataclass(frozen=True, slots=True)
class Charge:
    """One dimension of one scope; kind and measure say which. ``limit`` is in its own unit.

    ``name`` is what identifies it within the tenant.
    """

    scope: str
    kind: Kind
    measure: Measure
    limit: int
    name: str = field(init=False)

    def __post_init__(self) -> None:
        name = f"{self.kind.value}-{self.measure.value}:{self.scope}"
        object.__setattr__(self, "name", name)


class Outcome(Enum):
    """How a request fares. The values are the script's."""

    ADMITTED = 1
    DENIED = 2
    TOO_LARGE = 3
    # A budget may have been lost: the ledger must say what was spent before anybody can decide.
    UNSEEDED = 5


class Mode(Enum):
    """What an admission is for. The values are the script's."""

    NORMAL = 0
    # The request runs already: takes slots and holds again, unchecked, and no rates.
    RESTORE = 1
    # Only the states are wanted.
    PEEK = 2


@dataclass(frozen=True, slots=True)
class State:
    """What is left of one dimension after the decision."""

    remaining: int
    reset_us: int


@dataclass(frozen=True, slots=True)
class Decision:
    """The answer for one request.

    ``binding_idx`` and ``wait_us`` belong to a denial: the charge with the longest wait, and when
    the same request would pass (`NEVER`: waiting does not help). UNSEEDED has no states.
    """

    outcome: Outcome
    binding_idx: int
    wait_us: int
    states: list[State]


def spacing(cost: int, limit: int) -> tuple[int, int]:
    """Return the time *cost* takes at *limit* a minute: (microseconds, rest in 1/limit)."""
    return divmod(cost * MINUTE_US, limit)


def rate_state(limit: int, used_us: int, rest: int) -> State:
    """Return what is left when TAT is *used_us* and *rest* / *limit* microseconds ahead of now."""
    free = MINUTE_US * limit - (used_us * limit + rest)
    return State(max(0, free // MINUTE_US), used_us + (rest > 0))


def window_state(limit: int, used: int, reset_us: int) -> State:
    """Return what is left of a counter."""
    return State(max(0, limit - used), reset_us)


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time with counters of its own. Unix microseconds; end 0 = it never ends."""

    name: str
    from_us: int
    to_us: int

    def left_us(self, now_us: int) -> int:
        """Return the time until it ends; 0 = never."""
        return self.to_us - now_us if self.to_us else 0


def window_of(kind: Kind, at_us: int) -> Window:
    """Return the window of a kind that a moment lies in."""
    if kind is Kind.TOTAL_BUDGET:
        return _TOTAL
    return _window_of_day(kind is Kind.MONTH_BUDGET, at_us // DAY_US)


_TOTAL = Window("all", 0, 0)


@functools.lru_cache(maxsize=1024)
def _window_of_day(is_month: bool, day: int) -> Window:
    if is_month:
        at = _EPOCH + timedelta(days=day)
        first = datetime(at.year, at.month, 1, tzinfo=UTC)
        following = datetime(at.year + at.month // 12, at.month % 12 + 1, 1, tzinfo=UTC)
        return Window(f"{at.year:04d}{at.month:02d}", _unix_us(first), _unix_us(following))
    return Window(str(day), day * DAY_US, (day + 1) * DAY_US)


def _unix_us(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(microseconds=1)
