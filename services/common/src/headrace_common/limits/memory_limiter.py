"""All limits of one tenant in memory: decides as the script does, key for key.

It is the oracle of the script's tests, and serves while Redis is away. Pure: time is an argument.
Set back, it gives nothing twice and lets no rate wait longer than debt can.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headrace_common.limits.limiter import (
    MAX_DEBT_US,
    MINUTE_US,
    NEVER,
    POLL_US,
    Amounts,
    Charge,
    Decision,
    Kind,
    Mode,
    Outcome,
    State,
    rate_state,
    spacing,
    window_of,
    window_state,
)


@dataclass
class Budget:
    """One window of one budget. Nano-USD."""

    spent: int = 0
    held: int = 0


@dataclass
class Lease:
    """What one running request holds."""

    expires_us: int
    admitted_us: int
    charges: Sequence[Charge]
    amounts: Amounts
    # Brought back from the ledger, which knows of money only.
    is_rebuilt: bool = False
    # Brought back by its gateway: its rates were not charged here.
    is_restored: bool = False

    def counters(self) -> Iterable[tuple[Charge, tuple[str, str]]]:
        """Each charge with the key of its counter."""
        for charge in self.charges:
            yield charge, _key(charge, self.admitted_us)


@dataclass(frozen=True)
class Hold:
    """An open request as the ledger tells it: its budgets and what it holds of each."""

    lease_id: str
    charges: Sequence[Charge]
    admitted_us: int
    cost_nano_usd: int


@dataclass
class MemoryLimiter:
    """One tenant's limits.

    Args:
        has_ledger: a budget that is not known here may have been lost (`Outcome.UNSEEDED`).
    """

    has_ledger: bool = False
    # Since when nothing was lost; None = it is not known.
    since_us: int | None = None
    # name -> (TAT in microseconds, rest, the limit that the rest belongs to)
    rates: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    budgets: dict[tuple[str, str], Budget] = field(default_factory=dict)
    # name -> lease id -> expiry
    slots: dict[str, dict[str, int]] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    # Expired with money held: a late settle still books what was spent.
    late: dict[str, Lease] = field(default_factory=dict)
    # No lease ends before this.
    _first_end_us: float = math.inf

    def admit(
        self,
        lease_id: str,
        lease_us: int,
        charges: Sequence[Charge],
        amounts: Amounts,
        now_us: int,
        mode: Mode = Mode.NORMAL,
    ) -> Decision:
        """Decide, and charge everything or nothing. A live lease id is answered, not charged."""
        self.sweep(now_us)
        if mode is Mode.PEEK:
            return self._decision(Outcome.ADMITTED, charges, now_us)
        live = self.leases.get(lease_id)
        if live is not None and not (live.is_rebuilt and mode is Mode.RESTORE):
            return self._decision(Outcome.ADMITTED, charges, now_us)
        if any(self._is_lost(charge, now_us) for charge in charges):
            return Decision(Outcome.UNSEEDED, -1, 0, [])
        if live is not None:
            self._release_holds(live)
        if mode is Mode.NORMAL:
            refusal = self._refusal(charges, amounts, now_us)
            if refusal is not None:
                return refusal
        expires_us = self._ends(now_us + lease_us)
        for charge in charges:
            self._apply(charge, amounts.of(charge.measure), lease_id, now_us, expires_us, mode)
        self.leases[lease_id] = Lease(
            expires_us, now_us, charges, amounts, is_restored=mode is Mode.RESTORE
        )
        return self._decision(Outcome.ADMITTED, charges, now_us)

    def settle(self, lease_id: str, actual: Amounts, now_us: int) -> bool:
        """Replace the reservation by what was used. False: not a live lease."""
        self.sweep(now_us)
        lease = self.leases.pop(lease_id, None)
        if lease is None:
            if late := self.late.pop(lease_id, None):
                for charge, key in late.counters():
                    if charge.kind.is_budget:
                        self.budgets[key].spent += actual.cost_nano_usd
            return False
        for charge, key in lease.counters():
            self._settle_one(charge, key, lease, lease_id, actual, now_us)
        return True

    def renew(self, lease_ids: Iterable[str], lease_us: int, now_us: int) -> list[str]:
        """Extend leases; return those that are not live, or known from the ledger only."""
        self.sweep(now_us)
        unknown = []
        for lease_id in lease_ids:
            lease = self.leases.get(lease_id)
            if lease is None or lease.is_rebuilt:
                unknown.append(lease_id)
            if lease is None:
                continue
            lease.expires_us = self._ends(now_us + lease_us)
            for charge in lease.charges:
                if charge.kind is Kind.SLOTS:
                    self.slots[charge.name][lease_id] = lease.expires_us
        return unknown

    def seed(
        self,
        spends: Iterable[tuple[Charge, int, int]],
        holds: Iterable[Hold],
        lease_us: int,
        now_us: int,
    ) -> int:
        """Raise budgets to what the ledger has: (charge, a time in the window, spent) each.

        Returns:
            The largest difference found. Nano-USD.
        """
        self.sweep(now_us)
        drift = 0
        for charge, at_us, spent in spends:
            budget = self.budgets.setdefault(_key(charge, at_us), Budget())
            drift = max(drift, spent - budget.spent)
            budget.spent = max(budget.spent, spent)
        for hold in holds:
            if hold.lease_id in self.leases or hold.lease_id in self.late:
                continue
            amounts = Amounts(cost_nano_usd=hold.cost_nano_usd)
            lease = Lease(
                self._ends(now_us + lease_us), hold.admitted_us, hold.charges, amounts, True
            )
            for _, key in lease.counters():
                self.budgets.setdefault(key, Budget()).held += hold.cost_nano_usd
            self.leases[hold.lease_id] = lease
        if self.since_us is None:
            self.since_us = now_us
        return drift

    def leave(self, charge: Charge, left: int, at_us: int) -> None:
        """Let no more than *left* of a rate or count be free at *at_us*, as somebody else says."""
        used = max(0, charge.limit - left)
        if charge.kind is Kind.RATE:
            step_us, rest = spacing(used, charge.limit)
            if at_us + step_us > self._tat(charge.name, charge.limit, at_us)[0]:
                self.rates[charge.name] = (at_us + step_us, rest, charge.limit)
        else:
            key = _key(charge, at_us)
            self.counts[key] = max(self.counts.get(key, 0), used)

    def sweep(self, now_us: int) -> None:
        """Free what expired leases held. Their rates stand as reserved."""
        if now_us < self._first_end_us:
            return
        for lease_id in [i for i, lease in self.leases.items() if lease.expires_us <= now_us]:
            lease = self.leases.pop(lease_id)
            for charge in lease.charges:
                if charge.kind is Kind.SLOTS:
                    self.slots[charge.name].pop(lease_id, None)
                elif charge.kind.is_budget:
                    self.late[lease_id] = lease
            self._release_holds(lease)
        ends = (lease.expires_us for lease in self.leases.values())
        self._first_end_us = min(ends, default=math.inf)

    def _ends(self, expires_us: int) -> int:
        self._first_end_us = min(self._first_end_us, expires_us)
        return expires_us

    def _release_holds(self, lease: Lease) -> None:
        for charge, key in lease.counters():
            if charge.kind.is_budget:
                self.budgets[key].held -= lease.amounts.cost_nano_usd

    def _is_lost(self, charge: Charge, now_us: int) -> bool:
        if not (self.has_ledger and charge.kind.is_budget):
            return False
        window = window_of(charge.kind, now_us)
        if (charge.name, window.name) in self.budgets:
            return False
        return self.since_us is None or window.from_us < self.since_us

    def _refusal(self, charges: Sequence[Charge], amounts: Amounts, now_us: int) -> Decision | None:
        for idx, charge in enumerate(charges):
            if not charge.kind.is_budget and amounts.of(charge.measure) > charge.limit:
                return self._decision(Outcome.TOO_LARGE, charges, now_us, idx, NEVER)
        waits = [self.wait_us(charge, amounts.of(charge.measure), now_us) for charge in charges]
        if not any(waits):
            return None
        longest = NEVER if NEVER in waits else max(waits)
        return self._decision(Outcome.DENIED, charges, now_us, waits.index(longest), longest)

    def _tat(self, name: str, limit: int, now_us: int) -> tuple[int, int]:
        tat_us, rest, rest_of = self.rates.get(name, (now_us, 0, limit))
        if rest_of != limit:
            tat_us, rest = tat_us + (rest > 0), 0
        if tat_us < now_us:
            return now_us, 0
        # No request moves TAT further than this: the clock was ahead when it did.
        latest_us = now_us + MINUTE_US + MAX_DEBT_US
        if tat_us > latest_us:
            tat_us, rest = latest_us, 0
            self.rates[name] = (tat_us, rest, limit)
        return tat_us, rest

    def wait_us(self, charge: Charge, cost: int, now_us: int) -> int:
        """Return how long one charge makes a request of *cost* wait; 0 = not at all."""
        window = window_of(charge.kind, now_us)
        match charge.kind:
            case Kind.RATE:
                tat_us, rest = self._tat(charge.name, charge.limit, now_us)
                step_us, step_rest = spacing(cost, charge.limit)
                carry, rest = divmod(rest + step_rest, charge.limit)
                over_us = tat_us + step_us + carry - now_us - MINUTE_US
                return max(0, over_us + (rest > 0))
            case Kind.DAY_COUNT:
                used = self.counts.get((charge.name, window.name), 0)
                return window.left_us(now_us) if used + cost > charge.limit else 0
            case Kind.SLOTS:
                held = self.slots.get(charge.name, {})
                if len(held) < charge.limit:
                    return 0
                return min(POLL_US, min(held.values()) - now_us) if held else POLL_US
            case _:
                budget = self.budgets.get((charge.name, window.name), Budget())
                return _budget_wait_us(budget, charge.limit, cost, window.left_us(now_us))

    def _apply(
        self, charge: Charge, cost: int, lease_id: str, now_us: int, expires_us: int, mode: Mode
    ) -> None:
        key = _key(charge, now_us)
        if charge.kind is Kind.SLOTS:
            self.slots.setdefault(charge.name, {})[lease_id] = expires_us
        elif charge.kind.is_budget:
            self.budgets.setdefault(key, Budget()).held += cost
        elif mode is Mode.RESTORE:
            return
        elif charge.kind is Kind.RATE:
            self._move(charge.name, charge.limit, cost, now_us)
        else:
            self.counts[key] = self.counts.get(key, 0) + cost

    def _move(self, name: str, limit: int, cost: int, now_us: int) -> None:
        """Move TAT by *cost*, which may be negative; not beyond the debt allowed."""
        tat_us, rest = self._tat(name, limit, now_us)
        step_us, step_rest = spacing(cost, limit)
        carry, rest = divmod(rest + step_rest, limit)
        tat_us += step_us + carry
        latest_us = now_us + MINUTE_US + MAX_DEBT_US
        self.rates[name] = (tat_us, rest, limit) if tat_us < latest_us else (latest_us, 0, limit)

    def _settle_one(
        self,
        charge: Charge,
        key: tuple[str, str],
        lease: Lease,
        lease_id: str,
        actual: Amounts,
        now_us: int,
    ) -> None:
        reserved, used = lease.amounts.of(charge.measure), actual.of(charge.measure)
        if charge.kind is Kind.SLOTS:
            self.slots[charge.name].pop(lease_id, None)
        elif charge.kind.is_budget:
            self.budgets[key].held -= reserved
            self.budgets[key].spent += used
        elif lease.is_restored:
            return
        elif charge.kind is Kind.RATE:
            self._move(charge.name, charge.limit, used - reserved, now_us)
        else:
            self.counts[key] += used - reserved

    def _decision(
        self,
        outcome: Outcome,
        charges: Sequence[Charge],
        now_us: int,
        binding_idx: int = -1,
        wait_us: int = 0,
    ) -> Decision:
        states = [self._state(charge, now_us) for charge in charges]
        return Decision(outcome, binding_idx, wait_us, states)

    def _state(self, charge: Charge, now_us: int) -> State:
        window = window_of(charge.kind, now_us)
        key = (charge.name, window.name)
        match charge.kind:
            case Kind.RATE:
                tat_us, rest = self._tat(charge.name, charge.limit, now_us)
                return rate_state(charge.limit, tat_us - now_us, rest)
            case Kind.DAY_COUNT:
                return window_state(charge.limit, self.counts.get(key, 0), window.left_us(now_us))
            case Kind.SLOTS:
                return window_state(charge.limit, len(self.slots.get(charge.name, {})), 0)
            case _:
                budget = self.budgets.get(key, Budget())
                used = budget.spent + budget.held
                return window_state(charge.limit, used, window.left_us(now_us))


def _key(charge: Charge, at_us: int) -> tuple[str, str]:
    return charge.name, window_of(charge.kind, at_us).name


def _budget_wait_us(budget: Budget, limit: int, cost: int, left_us: int) -> int:
    if budget.spent + budget.held + cost <= limit:
        return 0
    if budget.spent + cost <= limit:
        return POLL_US
    return NEVER if cost > limit or not left_us else left_us
