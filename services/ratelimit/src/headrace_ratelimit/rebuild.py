"""Budgets out of the ledger: what Redis holds of money is a copy, and copies get lost.

Three occasions, one operation (`store.seed_op`), which only ever raises what is spent:

- a budget is missing in Redis and its window is older than the tenant's data there: whoever asks
  waits until the ledger has said what was spent and held;
- for two minutes after that it is asked again now and then, as the ledger runs behind the requests;
- whenever Redis begins to answer, every budget is compared once, beside the requests: a store that
  was restarted from its file may have lost its last second, and a rate limiter that died during an
  outage has lost the settlements it kept.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from headrace_common.clock import Clock, unix_us
from headrace_common.errors import HeadraceError
from headrace_common.lifecycle import cancel_and_wait
from headrace_common.limits.limiter import Charge, Window, window_of
from headrace_common.limits.memory_limiter import Hold
from headrace_common.limits.plans import Place, Plan
from headrace_contracts.billing.v1 import billing_pb2
from headrace_ratelimit.batcher import Batcher
from headrace_ratelimit.metrics import RateLimitMetrics
from headrace_ratelimit.store import seed_op

# Life of a hold that came from the ledger: its gateway renews it well before, if it still runs.
_LEASE_US = 30_000_000
_RECHECK_S = 5.0
# The ledger has every request of before the loss by then; if it has not, the next loss tells.
_RECHECK_FOR_S = 120.0
_MAX_RECHECKED = 20_000
_MAX_QUERIES = 64


class Ledger(Protocol):
    """What billing offers here."""

    async def get_spend(self, request: billing_pb2.GetSpendRequest) -> billing_pb2.GetSpendResponse:
        """Return what budgets have seen."""
        ...


@dataclass(frozen=True)
class _Lost:
    """A window of a budget that is asked for."""

    charge: Charge
    place: Place
    window: Window

    @property
    def key(self) -> tuple[str, int]:
        return self.charge.name, self.window.from_us

    def query(self) -> billing_pb2.SpendQuery:
        return billing_pb2.SpendQuery(
            level=self.place.level,
            scope_id=self.place.scope_id,
            from_unix_us=self.window.from_us,
            to_unix_us=self.window.to_us,
        )


class Rebuilder:
    """Brings budgets back. Belongs to one event loop.

    Args:
        ledger: billing.
        batcher: the way to Redis.
        clock: time.
        metrics: see `RateLimitMetrics`.
    """

    def __init__(
        self, ledger: Ledger, batcher: Batcher, clock: Clock, metrics: RateLimitMetrics
    ) -> None:
        self._ledger, self._batcher, self._clock, self._metrics = ledger, batcher, clock, metrics
        self._running: dict[tuple[str, frozenset[tuple[str, int]]], asyncio.Task[None]] = {}
        # By tenant and window: what to ask for again, and until when.
        self._rechecked: OrderedDict[tuple[str, tuple[str, int]], tuple[_Lost, float]] = (
            OrderedDict()
        )
        self._generation = 1

    async def rebuild(self, plan: Plan, windows: Sequence[tuple[int, Window]]) -> None:
        """Bring back the budgets of a plan; cancelling the wait lets the work go on.

        Args:
            plan: whose.
            windows: index of each budget's charge, and its window.

        Raises:
            HeadraceError: the ledger or Redis does not answer.
        """
        lost = [_lost(plan, idx, window) for idx, window in windows]
        key = (plan.tenant_id, frozenset(it.key for it in lost))
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(self._rebuild(plan.tenant_id, lost))
            task.add_done_callback(lambda done: self._forget(key, done))
        await asyncio.shield(task)

    def compare_all(self) -> None:
        """Compare every budget with the ledger once more, when it is next used."""
        self._generation += 1

    def note(self, plan: Plan) -> None:
        """Have the budgets of a plan compared, once after each `compare_all`."""
        charges = plan.charges
        if not charges.budgets or charges.compared == self._generation:
            return
        charges.compared = self._generation
        now_us = unix_us(self._clock)
        for idx in charges.budgets:
            window = window_of(charges.charges[idx].kind, now_us)
            self._recheck(plan.tenant_id, _lost(plan, idx, window))

    async def run(self) -> None:
        """Compare what was rebuilt or not yet compared, for ever; run it under `supervise`."""
        while True:
            await asyncio.sleep(_RECHECK_S)
            await self.recheck()

    async def recheck(self) -> None:
        """Compare now. What could not be compared stays on the list, however late it is.

        Raises:
            HeadraceError: the ledger or Redis does not answer.
        """
        now_s = self._clock.now_s()
        by_tenant: dict[str, list[_Lost]] = {}
        for (tenant_id, _), (one, _) in self._rechecked.items():
            by_tenant.setdefault(tenant_id, []).append(one)
        failure: HeadraceError | None = None
        for tenant_id, all_lost in by_tenant.items():
            try:
                await self._compare(tenant_id, all_lost, now_s)
            except HeadraceError as error:
                # One tenant that cannot be compared must not keep the others from it.
                failure = error
        if failure is not None:
            raise failure

    async def close(self) -> None:
        """Stop what runs."""
        await cancel_and_wait(*self._running.values())

    async def _compare(self, tenant_id: str, all_lost: Sequence[_Lost], now_s: float) -> None:
        for start in range(0, len(all_lost), _MAX_QUERIES):
            lost = all_lost[start : start + _MAX_QUERIES]
            spends = await self._ask(tenant_id, lost)
            await self._seed(tenant_id, lost, spends, [])
            self._end_rechecks(tenant_id, lost, now_s)

    async def _rebuild(self, tenant_id: str, lost: Sequence[_Lost]) -> None:
        spends = await self._ask(tenant_id, lost)
        await self._seed(tenant_id, lost, spends, _holds(lost, spends))
        self._metrics.rebuilt_budgets.inc(len(lost))
        for it in lost:
            self._recheck(tenant_id, it)

    async def _ask(self, tenant_id: str, lost: Sequence[_Lost]) -> Sequence[billing_pb2.Spend]:
        request = billing_pb2.GetSpendRequest(
            tenant_id=tenant_id, queries=[it.query() for it in lost]
        )
        try:
            return (await self._ledger.get_spend(request)).spends
        except HeadraceError:
            self._metrics.ledger_failures.inc()
            raise

    async def _seed(
        self,
        tenant_id: str,
        lost: Sequence[_Lost],
        spends: Sequence[billing_pb2.Spend],
        holds: Iterable[Hold],
    ) -> None:
        told = [
            (it.charge, it.window.from_us, spend.spent_nano_usd)
            for it, spend in zip(lost, spends, strict=True)
        ]
        drift = await self._batcher.call(seed_op(tenant_id, told, holds, _LEASE_US))
        self._metrics.budget_drift_nano_usd.set(drift)

    def _recheck(self, tenant_id: str, lost: _Lost) -> None:
        until_s = self._clock.now_s() + _RECHECK_FOR_S
        self._rechecked[tenant_id, lost.key] = (lost, until_s)
        self._rechecked.move_to_end((tenant_id, lost.key))
        while len(self._rechecked) > _MAX_RECHECKED:
            self._rechecked.popitem(last=False)

    def _end_rechecks(self, tenant_id: str, compared: Sequence[_Lost], now_s: float) -> None:
        for it in compared:
            known = self._rechecked.get((tenant_id, it.key))
            if known is not None and known[1] <= now_s:
                del self._rechecked[tenant_id, it.key]

    def _forget(
        self, key: tuple[str, frozenset[tuple[str, int]]], task: asyncio.Task[None]
    ) -> None:
        self._running.pop(key, None)
        if not task.cancelled():
            # Marks it as seen: whoever waited may have given up.
            task.exception()


def _lost(plan: Plan, idx: int, window: Window) -> _Lost:
    return _Lost(plan.charges.charges[idx], plan.charges.places[idx], window)


def _holds(lost: Sequence[_Lost], spends: Sequence[billing_pb2.Spend]) -> Iterable[Hold]:
    """Put the holds of the single budgets together by request."""
    holds: dict[str, Hold] = {}
    for it, spend in zip(lost, spends, strict=True):
        for hold in spend.holds:
            known = holds.get(hold.request_id) or Hold(
                hold.request_id, (), it.window.from_us, hold.hold_nano_usd
            )
            holds[hold.request_id] = replace(
                known,
                charges=(*known.charges, it.charge),
                # Windows that end at the same time lie in one another: in all of them.
                admitted_us=max(known.admitted_us, it.window.from_us),
            )
    return holds.values()
