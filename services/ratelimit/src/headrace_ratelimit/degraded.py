"""What is granted while Redis is away: this replica's share of the rates, a little money.

Rates, counts and slots go by the same arithmetic in memory, against limit / replicas. Money:
prepaid keys with a budget are refused; postpaid ones may spend a fixed share of each budget per
outage, and not more than was left of it when Redis last said so.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from headrace_common.clock import Clock, unix_us
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_ratelimit.limiter import Amounts, Charge, Decision, MemoryLimiter
from headrace_ratelimit.plans import Plan, answer_of, share_of
from headrace_ratelimit.store import Foreign

# Budgets whose rest is remembered, and leases granted without Redis that may still be settled.
_MAX_REMEMBERED = 20_000
_MAX_LEASES = 100_000
_PER_MILLION = 1_000_000


class LocalShare:
    """Decides without Redis. Belongs to one event loop; every call is short.

    Args:
        num_replicas: how many rate limiters share the limits.
        overdraft_ratio: share of a budget that may be spent per outage, by all replicas together.
        clock: wall time, for windows.
    """

    def __init__(self, num_replicas: int, overdraft_ratio: float, clock: Clock) -> None:
        self._num_replicas = num_replicas
        self._overdraft_per_million = int(overdraft_ratio * _PER_MILLION)
        self._clock = clock
        self._tenants: dict[str, MemoryLimiter] = {}
        self._left: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._leases: OrderedDict[tuple[str, str], Foreign] = OrderedDict()

    def admit(self, plan: Plan) -> pb.AdmitResponse:
        """Decide."""
        if plan.prepaid and plan.has_budget:
            return pb.AdmitResponse(
                outcome=pb.AdmitResponse.OUTCOME_UNAVAILABLE,
                retry_after_us=1_000_000,
                degraded=True,
            )
        local = replace(plan, charges=[self._local_charge(plan.tenant_id, c) for c in plan.charges])
        limiter = self._tenants.setdefault(plan.tenant_id, MemoryLimiter())
        decision = limiter.admit(plan.lease_id, plan.lease_us, local.charges, unix_us(self._clock))
        response = answer_of(local, decision, degraded=True)
        if response.outcome == pb.AdmitResponse.OUTCOME_ADMITTED:
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

    def note(self, plan: Plan, decision: Decision) -> None:
        """Remember what Redis says is left of the budgets; its word ends an outage."""
        self._tenants.pop(plan.tenant_id, None)
        for charge, state in zip(plan.charges, decision.states, strict=True):
            if charge.kind.is_budget:
                key = (plan.tenant_id, charge.name)
                self._left[key] = state.remaining
                self._left.move_to_end(key)
        while len(self._left) > _MAX_REMEMBERED:
            self._left.popitem(last=False)

    def _local_charge(self, tenant_id: str, charge: Charge) -> Charge:
        if not charge.kind.is_budget:
            return share_of(charge, self._num_replicas)
        allowance = charge.limit * self._overdraft_per_million // _PER_MILLION
        left = self._left.get((tenant_id, charge.name), charge.limit)
        return replace(charge, limit=min(allowance, left) // self._num_replicas)

    def _remember_lease(self, plan: Plan) -> None:
        self._leases[plan.tenant_id, plan.lease_id] = [
            (charge.kind, charge.name) for charge in plan.charges if charge.kind.is_budget
        ]
        while len(self._leases) > _MAX_LEASES:
            self._leases.popitem(last=False)
