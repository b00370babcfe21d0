"""The arithmetic of all limits, in whole numbers, and a limiter in memory made of it.

Rates are GCRA (generic cell rate algorithm, ITU-T I.371, the virtual scheduling form) with a burst
of one minute's limit: a key's theoretical arrival time (TAT) says until when it has used up its
rate; a request moves it on by ``cost / limit`` minutes and passes if it stays within a minute from
now. TAT is kept exactly, as microseconds and a rest in 1/limit of a microsecond, so that a limit of
7 lets exactly 7 through and no rounding adds up.

Day, month and total are windows (UTC): a budget must run out, and a rate never does. A budget
counts what is spent and what is held by requests under way.

`MemoryLimiter` decides like `lua/admit.lua` does, key for key and microsecond for microsecond: it
is the oracle of the script's tests, and serves while Redis is away.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum

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
    """How a dimension is counted. The values are the script's."""

    RATE = "rate"
    DAY_COUNT = "count"
    SLOTS = "slots"
    DAY_BUDGET = "day"
    MONTH_BUDGET = "month"
    TOTAL_BUDGET = "total"

    @property
    def is_budget(self) -> bool:
        """Whether it counts money."""
        return self in (Kind.DAY_BUDGET, Kind.MONTH_BUDGET, Kind.TOTAL_BUDGET)


class Measure(Enum):
    """Which amount of a request a dimension counts. The values are the script's."""

    REQUESTS = "requests"
    INPUT_TOKENS = "input"
    OUTPUT_TOKENS = "output"
    TOKENS = "tokens"
    COST = "cost"
    LEASES = "leases"


@dataclass(frozen=True)
class Amounts:
    """What a request reserves or has used."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_nano_usd: int = 0

    def of(self, measure: Measure) -> int:
        """Return the amount that *measure* names."""
        match measure:
            case Measure.REQUESTS:
                return self.requests
            case Measure.INPUT_TOKENS:
                return self.input_tokens
            case Measure.OUTPUT_TOKENS:
                return self.output_tokens
            case Measure.TOKENS:
                return self.input_tokens + self.output_tokens
            case Measure.COST:
                return self.cost_nano_usd
            case Measure.LEASES:
                return 1


@dataclass(frozen=True)
class Charge:
    """What one dimension of one scope is asked for.

    ``name`` identifies the dimension and scope within the tenant; ``limit`` and ``cost`` are in the
    dimension's own unit.
    """

    name: str
    kind: Kind
    measure: Measure
    limit: int
    cost: int


class Outcome(Enum):
    """How a request fares. The values are the script's."""

    ADMITTED = 1
    DENIED = 2
    TOO_LARGE = 3


@dataclass(frozen=True)
class State:
    """What is left of one dimension after the decision."""

    remaining: int
    reset_us: int


@dataclass(frozen=True)
class Decision:
    """The answer for one request.

    ``binding_idx`` and ``wait_us`` belong to a denial: the charge with the longest wait, and when
    the same request would pass (`NEVER`: waiting does not help).
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


def window_of(kind: Kind, now_us: int) -> tuple[str, int]:
    """Return the current window's name and the microseconds until it ends (0 = never)."""
    if kind is Kind.TOTAL_BUDGET:
        return "all", 0
    if kind is Kind.MONTH_BUDGET:
        now = _EPOCH + timedelta(microseconds=now_us)
        following = datetime(now.year + now.month // 12, now.month % 12 + 1, 1, tzinfo=UTC)
        left = following - now
        return f"{now.year:04d}{now.month:02d}", left // timedelta(microseconds=1)
    day, into_us = divmod(now_us, DAY_US)
    return str(day), DAY_US - into_us


@dataclass
class _Budget:
    spent: int = 0
    held: int = 0


@dataclass
class _Lease:
    expires_us: int
    # With the window's name where the kind has one.
    charges: list[tuple[Charge, str]]


@dataclass
class MemoryLimiter:
    """All limits of one tenant, in memory. Pure: time is an argument and never goes back."""

    # name -> (TAT in microseconds, rest, the limit that the rest belongs to)
    rates: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    budgets: dict[tuple[str, str], _Budget] = field(default_factory=dict)
    # name -> lease id -> expiry
    slots: dict[str, dict[str, int]] = field(default_factory=dict)
    leases: dict[str, _Lease] = field(default_factory=dict)
    # Expired with money held: a late settle still books what was spent.
    late: dict[str, _Lease] = field(default_factory=dict)

    def admit(self, lease_id: str, lease_us: int, charges: list[Charge], now_us: int) -> Decision:
        """Decide, and charge everything or nothing. A live lease id is answered, not charged."""
        self.sweep(now_us)
        if lease_id in self.leases:
            return self._decision(Outcome.ADMITTED, charges, now_us)
        for idx, charge in enumerate(charges):
            if not charge.kind.is_budget and charge.cost > charge.limit:
                return self._decision(Outcome.TOO_LARGE, charges, now_us, idx, NEVER)
        waits = [self._wait_us(charge, now_us) for charge in charges]
        if any(waits):
            longest = NEVER if NEVER in waits else max(waits)
            return self._decision(Outcome.DENIED, charges, now_us, waits.index(longest), longest)
        for charge in charges:
            self._apply(charge, lease_id, now_us, now_us + lease_us)
        windows = [(charge, window_of(charge.kind, now_us)[0]) for charge in charges]
        self.leases[lease_id] = _Lease(now_us + lease_us, windows)
        return self._decision(Outcome.ADMITTED, charges, now_us)

    def settle(self, lease_id: str, actual: Amounts, now_us: int) -> bool:
        """Replace the reservation by what was used. False: not a live lease."""
        self.sweep(now_us)
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            if late := self.late.pop(lease_id, None):
                self._spend(late, actual.cost_nano_usd)
            return False
        for charge, window in lease.charges:
            self._settle_one(charge, window, lease_id, actual.of(charge.measure), now_us)
        return True

    def renew(self, lease_ids: list[str], lease_us: int, now_us: int) -> list[str]:
        """Extend leases; return those that are not live."""
        self.sweep(now_us)
        unknown = []
        for lease_id in lease_ids:
            lease = self.leases.get(lease_id)
            if lease is None:
                unknown.append(lease_id)
                continue
            lease.expires_us = now_us + lease_us
            for charge, _ in lease.charges:
                if charge.kind is Kind.SLOTS:
                    self.slots[charge.name][lease_id] = lease.expires_us
        return unknown

    def sweep(self, now_us: int) -> None:
        """Free what expired leases held. Their rates stand as reserved."""
        for lease_id in [i for i, lease in self.leases.items() if lease.expires_us <= now_us]:
            lease = self.leases.pop(lease_id)
            for charge, window in lease.charges:
                if charge.kind is Kind.SLOTS:
                    self.slots[charge.name].pop(lease_id, None)
                elif charge.kind.is_budget:
                    self.budgets[charge.name, window].held -= charge.cost
                    self.late[lease_id] = lease

    def _tat(self, name: str, limit: int, now_us: int) -> tuple[int, int]:
        tat_us, rest, rest_of = self.rates.get(name, (now_us, 0, limit))
        if rest_of != limit:
            tat_us, rest = tat_us + (rest > 0), 0
        return (tat_us, rest) if tat_us >= now_us else (now_us, 0)

    def _wait_us(self, charge: Charge, now_us: int) -> int:
        window, reset_us = window_of(charge.kind, now_us)
        match charge.kind:
            case Kind.RATE:
                tat_us, rest = self._tat(charge.name, charge.limit, now_us)
                step_us, step_rest = spacing(charge.cost, charge.limit)
                carry, rest = divmod(rest + step_rest, charge.limit)
                over_us = tat_us + step_us + carry - now_us - MINUTE_US
                return max(0, over_us + (rest > 0))
            case Kind.DAY_COUNT:
                used = self.counts.get((charge.name, window), 0)
                return reset_us if used + charge.cost > charge.limit else 0
            case Kind.SLOTS:
                held = self.slots.get(charge.name, {})
                return min(POLL_US, min(held.values()) - now_us) if len(held) >= charge.limit else 0
            case _:
                return self._budget_wait_us(charge, window, reset_us)

    def _budget_wait_us(self, charge: Charge, window: str, reset_us: int) -> int:
        budget = self.budgets.get((charge.name, window), _Budget())
        if budget.spent + budget.held + charge.cost <= charge.limit:
            return 0
        if budget.spent + charge.cost <= charge.limit:
            return POLL_US
        return NEVER if charge.cost > charge.limit or not reset_us else reset_us

    def _apply(self, charge: Charge, lease_id: str, now_us: int, expires_us: int) -> None:
        window, _ = window_of(charge.kind, now_us)
        match charge.kind:
            case Kind.RATE:
                self._move(charge.name, charge.limit, charge.cost, now_us)
            case Kind.DAY_COUNT:
                key = (charge.name, window)
                self.counts[key] = self.counts.get(key, 0) + charge.cost
            case Kind.SLOTS:
                self.slots.setdefault(charge.name, {})[lease_id] = expires_us
            case _:
                self.budgets.setdefault((charge.name, window), _Budget()).held += charge.cost

    def _move(self, name: str, limit: int, cost: int, now_us: int) -> None:
        """Move TAT by *cost*, which may be negative; not beyond the debt allowed."""
        tat_us, rest = self._tat(name, limit, now_us)
        step_us, step_rest = spacing(cost, limit)
        carry, rest = divmod(rest + step_rest, limit)
        tat_us += step_us + carry
        latest_us = now_us + MINUTE_US + MAX_DEBT_US
        self.rates[name] = (tat_us, rest, limit) if tat_us < latest_us else (latest_us, 0, limit)

    def _settle_one(
        self, charge: Charge, window: str, lease_id: str, actual: int, now_us: int
    ) -> None:
        match charge.kind:
            case Kind.RATE:
                self._move(charge.name, charge.limit, actual - charge.cost, now_us)
            case Kind.DAY_COUNT:
                self.counts[charge.name, window] += actual - charge.cost
            case Kind.SLOTS:
                self.slots[charge.name].pop(lease_id, None)
            case _:
                budget = self.budgets[charge.name, window]
                budget.held -= charge.cost
                budget.spent += actual

    def _spend(self, lease: _Lease, cost: int) -> None:
        for charge, window in lease.charges:
            if charge.kind.is_budget:
                self.budgets[charge.name, window].spent += cost

    def _decision(
        self,
        outcome: Outcome,
        charges: list[Charge],
        now_us: int,
        binding_idx: int = -1,
        wait_us: int = 0,
    ) -> Decision:
        states = [self._state(charge, now_us) for charge in charges]
        return Decision(outcome, binding_idx, wait_us, states)

    def _state(self, charge: Charge, now_us: int) -> State:
        window, reset_us = window_of(charge.kind, now_us)
        match charge.kind:
            case Kind.RATE:
                tat_us, rest = self._tat(charge.name, charge.limit, now_us)
                return rate_state(charge.limit, tat_us - now_us, rest)
            case Kind.DAY_COUNT:
                return window_state(
                    charge.limit, self.counts.get((charge.name, window), 0), reset_us
                )
            case Kind.SLOTS:
                return window_state(charge.limit, len(self.slots.get(charge.name, {})), 0)
            case _:
                budget = self.budgets.get((charge.name, window), _Budget())
                return window_state(charge.limit, budget.spent + budget.held, reset_us)
