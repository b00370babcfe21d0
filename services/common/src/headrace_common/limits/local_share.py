"""What is granted while nobody can be asked: this replica's share of the rates, a little money.

Two use it: the rate limiter while Redis is away, a gateway while the rate limiter is away. Rates,
counts and slots go by the same arithmetic in memory, against limit / replicas. Of rates and counts
no more is granted than this replica's share of what was left when the other side last said so, less
what was granted here before: a moment's outage gives nobody their minute anew. Money: prepaid keys
with a budget are refused; postpaid ones may spend a fixed share of each budget per outage, and not
more than was left of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from headrace_common.clock import Clock, unix_us
from headrace_common.limits.limiter import Amounts, Charge, Kind, Mode
from headrace_common.limits.memory_limiter import MemoryLimiter
from headrace_common.limits.plans import ChargeSet, Plan, answer_of
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb

K = TypeVar("K")
V = TypeVar("V")

# (kind, scope) of each budget that a lease granted here is booked to.
Foreign = list[tuple[Kind, str]]
_Rates = dict[str, tuple[int, int, int]]
_Counts = dict[tuple[str, str], int]
# Budgets, rates and counts whose rest is remembered; leases granted here that may still be settled.
_MAX_REMEMBERED = 20_000
_MAX_LEASES = 100_000
_PER_MILLION = 1_000_000


class LocalShare:
    """Decides alone. Belongs to one event loop; every call is short.

    Args:
        num_replicas: how many deciders share the limits.
        overdraft_ratio: share of a budget that may be spent per outage, by all replicas together.
        clock: wall time, for windows.
    """

    def __init__(self, num_replicas: int, overdraft_ratio: float, clock: Clock) -> None:
        self._num_replicas = num_replicas
        self._overdraft_per_million = int(overdraft_ratio * _PER_MILLION)
        self._clock = clock
        self._tenants: dict[str, MemoryLimiter] = {}
        self._left: OrderedDict[tuple[str, str], int] = OrderedDict()
        # Of a rate or count: what was left, and when; until an outage begins with it.
        self._said: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()
        # What outages that are over left of a tenant's rates and counts, for the next.
        self._past: OrderedDict[str, tuple[_Rates, _Counts]] = OrderedDict()
        self._leases: OrderedDict[tuple[str, str], Foreign] = OrderedDict()

    def admit(self, plan: Plan) -> pb.AdmitResponse:
        """Decide."""
        if plan.prepaid and plan.charges.budgets:
            return pb.AdmitResponse(
                outcome=pb.AdmitResponse.OUTCOME_UNAVAILABLE,
                retry_after_us=1_000_000,
                degraded=True,
            )
        charges = self._local_charges(plan)
        limiter = self._tenants.get(plan.tenant_id)
        if limiter is None:
            limiter = self._tenants[plan.tenant_id] = MemoryLimiter()
            if past := self._past.pop(plan.tenant_id, None):
                limiter.rates, limiter.counts = past
        now_us = unix_us(self._clock)
        for idx in plan.charges.counted:
            if said := self._said.pop((plan.tenant_id, charges[idx].name), None):
                limiter.leave(charges[idx], said[0] // self._num_replicas, said[1])
        decision = limiter.admit(
            plan.lease_id, plan.lease_us, charges, plan.amounts, now_us, plan.mode
        )
        response = answer_of(plan, decision, charges=charges, degraded=True)
        is_admitted = response.outcome == pb.AdmitResponse.OUTCOME_ADMITTED
        if is_admitted and plan.mode is not Mode.PEEK:
            self._remember_lease(plan)
        return response

    def settle(self, tenant_id: str, lease_id: str, actual: Amounts) -> Foreign | None:
        """End a lease granted here; return the budgets to book it to. None: not one of ours."""
        foreign = self._leases.pop((tenant_id, lease_id), None)
        if foreign is not None and (limiter := self._tenants.get(tenant_id)):
            limiter.settle(lease_id, actual, unix_us(self._clock))
        return foreign

    def renew(self, tenant_id: str, lease_ids: list[str], lease_us: int) -> None:
        """Extend what was granted here."""
        if limiter := self._tenants.get(tenant_id):
            limiter.renew(lease_ids, lease_us, unix_us(self._clock))

    def owns(self, tenant_id: str, lease_id: str) -> bool:
        """Whether the lease was granted here and not settled yet."""
        return (tenant_id, lease_id) in self._leases

    def note(self, tenant_id: str, charges: ChargeSet, remaining: Sequence[int]) -> None:
        """Remember what is left, by who knows; that word ends an outage.

        Args:
            tenant_id: whose.
            charges: what was asked about.
            remaining: of each charge, in its order.
        """
        if self._tenants and (limiter := self._tenants.pop(tenant_id, None)):
            self._past[tenant_id] = limiter.rates, limiter.counts
            _bound(self._past, _MAX_REMEMBERED)
        now_us = unix_us(self._clock)
        for idx in charges.counted:
            key = tenant_id, charges.names[idx]
            self._said[key] = remaining[idx], now_us
            self._said.move_to_end(key)
        _bound(self._said, _MAX_REMEMBERED)
        for idx in charges.budgets:
            allowance = self._allowance(charges.rows[idx][2])
            if remaining[idx] < allowance or self._left:
                self._note_budget((tenant_id, charges.names[idx]), remaining[idx], allowance)

    def forget(self, tenant_id: str, lease_id: str) -> None:
        """A lease granted here is known on the other side now."""
        self._leases.pop((tenant_id, lease_id), None)

    def _allowance(self, limit: int) -> int:
        return limit * self._overdraft_per_million // _PER_MILLION

    def _note_budget(self, key: tuple[str, str], left: int, allowance: int) -> None:
        self._left.pop(key, None)
        # While more is left than may be spent alone, it does not matter how much.
        if left < allowance:
            self._left[key] = left
            _bound(self._left, _MAX_REMEMBERED)

    def _local_charges(self, plan: Plan) -> list[Charge]:
        whole = plan.charges
        if whole.shares is None:
            whole.shares = tuple(replace(it, limit=self._share(it)) for it in whole.charges)
        measures = plan.amounts.measures
        charges = list(whole.shares)
        for idx, charge in enumerate(charges):
            if charge.kind.is_budget:
                left = self._left.get((plan.tenant_id, charge.name))
                if left is not None:
                    charges[idx] = replace(charge, limit=left // self._num_replicas)
            elif charge.limit < (cost := measures[charge.measure.value - 1]) <= whole.rows[idx][2]:
                # What the whole limit could hold is not too large for the share: it uses it up.
                charges[idx] = replace(charge, limit=cost)
        return charges

    def _share(self, charge: Charge) -> int:
        if charge.kind.is_budget:
            return self._allowance(charge.limit) // self._num_replicas
        return max(1, charge.limit // self._num_replicas)

    def _remember_lease(self, plan: Plan) -> None:
        self._leases[plan.tenant_id, plan.lease_id] = [
            (plan.charges.charges[idx].kind, plan.charges.charges[idx].scope)
            for idx in plan.charges.budgets
        ]
        _bound(self._leases, _MAX_LEASES)


def _bound(remembered: OrderedDict[K, V], most: int) -> None:
    while len(remembered) > most:
        remembered.popitem(last=False)
