"""From the contract to charges and back.

A request's charges stand in the order of its scopes and, within one, of the table below; that order
breaks ties between equal waits, and states come back in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from headrace_common.errors import InvalidRequest
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_ratelimit.limiter import (
    MAX_COST,
    MAX_NANO_USD,
    MAX_RATE_LIMIT,
    NEVER,
    Amounts,
    Charge,
    Decision,
    Kind,
    Measure,
    Outcome,
)

MAX_ID_CHARS = 256
MAX_SCOPES = 8
MIN_LEASE_MS, MAX_LEASE_MS = 1, 3_600_000


@dataclass(frozen=True)
class _Dimension:
    number: pb.Dimension.ValueType
    limit_field: str
    kind: Kind
    measure: Measure


_DIMENSIONS = (
    _Dimension(
        pb.DIMENSION_REQUESTS_PER_MINUTE, "requests_per_minute", Kind.RATE, Measure.REQUESTS
    ),
    _Dimension(
        pb.DIMENSION_INPUT_TOKENS_PER_MINUTE,
        "input_tokens_per_minute",
        Kind.RATE,
        Measure.INPUT_TOKENS,
    ),
    _Dimension(
        pb.DIMENSION_OUTPUT_TOKENS_PER_MINUTE,
        "output_tokens_per_minute",
        Kind.RATE,
        Measure.OUTPUT_TOKENS,
    ),
    _Dimension(pb.DIMENSION_TOKENS_PER_MINUTE, "tokens_per_minute", Kind.RATE, Measure.TOKENS),
    _Dimension(pb.DIMENSION_REQUESTS_PER_DAY, "requests_per_day", Kind.DAY_COUNT, Measure.REQUESTS),
    _Dimension(pb.DIMENSION_CONCURRENCY, "max_concurrent", Kind.SLOTS, Measure.LEASES),
    _Dimension(pb.DIMENSION_DAY_BUDGET, "day_budget_nano_usd", Kind.DAY_BUDGET, Measure.COST),
    _Dimension(pb.DIMENSION_MONTH_BUDGET, "month_budget_nano_usd", Kind.MONTH_BUDGET, Measure.COST),
    _Dimension(pb.DIMENSION_TOTAL_BUDGET, "total_budget_nano_usd", Kind.TOTAL_BUDGET, Measure.COST),
)


@dataclass(frozen=True)
class Place:
    """Where a charge comes from."""

    level: pb.Level.ValueType
    dimension: pb.Dimension.ValueType


@dataclass(frozen=True)
class Plan:
    """A checked request to admit."""

    tenant_id: str
    lease_id: str
    lease_us: int
    prepaid: bool
    charges: list[Charge]
    places: list[Place]

    @property
    def has_budget(self) -> bool:
        """Whether money is to be checked."""
        return any(charge.kind.is_budget for charge in self.charges)


def plan_of(request: pb.AdmitRequest) -> Plan:
    """Check a request and list its charges.

    Raises:
        InvalidRequest: something is missing, or too large to be counted exactly.
    """
    check_id("tenant_id", request.tenant_id)
    check_id("lease_id", request.lease_id)
    check_lease_ms(request.lease_ms)
    reserve = amounts_of(request.reserve)
    if len(request.scopes) > MAX_SCOPES:
        raise InvalidRequest(f"A request has at most {MAX_SCOPES} scopes.", param="scopes")
    charges: list[Charge] = []
    places: list[Place] = []
    for scope in request.scopes:
        for place, charge in _charges_of(scope, reserve):
            places.append(place)
            charges.append(charge)
    if len({charge.name for charge in charges}) != len(charges):
        raise InvalidRequest("A scope is given twice.", param="scopes")
    return Plan(
        tenant_id=request.tenant_id,
        lease_id=request.lease_id,
        lease_us=request.lease_ms * 1000,
        prepaid=request.prepaid,
        charges=charges,
        places=places,
    )


def _charges_of(scope: pb.Scope, reserve: Amounts) -> Iterator[tuple[Place, Charge]]:
    check_id("scope_id", scope.scope_id)
    # Set, for a budget; not 0, for the others.
    present = {field.name for field, _ in scope.limits.ListFields()}
    for dimension in _DIMENSIONS:
        if dimension.limit_field not in present:
            continue
        limit: int = getattr(scope.limits, dimension.limit_field)
        bound = MAX_NANO_USD if dimension.kind.is_budget else MAX_RATE_LIMIT
        if limit > bound:
            raise InvalidRequest(
                f"{dimension.limit_field} is at most {bound}.", param=dimension.limit_field
            )
        yield (
            Place(scope.level, dimension.number),
            Charge(
                name=f"{dimension.number}:{scope.level}:{scope.scope_id}",
                kind=dimension.kind,
                measure=dimension.measure,
                limit=limit,
                cost=reserve.of(dimension.measure),
            ),
        )


def amounts_of(amounts: pb.Amounts) -> Amounts:
    """Check amounts.

    Raises:
        InvalidRequest: too large to be counted exactly.
    """
    for name in ("requests", "input_tokens", "output_tokens"):
        if getattr(amounts, name) > MAX_COST // 2:
            raise InvalidRequest(f"{name} is at most {MAX_COST // 2}.", param=name)
    if amounts.cost_nano_usd > MAX_NANO_USD:
        raise InvalidRequest(f"cost_nano_usd is at most {MAX_NANO_USD}.", param="cost_nano_usd")
    return Amounts(
        requests=amounts.requests,
        input_tokens=amounts.input_tokens,
        output_tokens=amounts.output_tokens,
        cost_nano_usd=amounts.cost_nano_usd,
    )


def check_id(name: str, value: str) -> None:
    """Check an id that becomes part of a key.

    Raises:
        InvalidRequest: empty, too long, or with a brace (Redis finds hash tags by them).
    """
    if not value or len(value) > MAX_ID_CHARS or "{" in value or "}" in value:
        raise InvalidRequest(
            f"{name} must have 1 to {MAX_ID_CHARS} characters and no braces.", param=name
        )


def check_lease_ms(lease_ms: int) -> None:
    """Check a lease's life.

    Raises:
        InvalidRequest: zero or above an hour.
    """
    if not MIN_LEASE_MS <= lease_ms <= MAX_LEASE_MS:
        raise InvalidRequest(
            f"lease_ms must be {MIN_LEASE_MS} to {MAX_LEASE_MS}.", param="lease_ms"
        )


def share_of(charge: Charge, divisor: int) -> Charge:
    """Return the charge against this replica's share of the limit; at least one of anything."""
    return replace(charge, limit=max(1, charge.limit // divisor))


_OUTCOMES = {
    Outcome.ADMITTED: pb.AdmitResponse.OUTCOME_ADMITTED,
    Outcome.DENIED: pb.AdmitResponse.OUTCOME_DENIED,
    Outcome.TOO_LARGE: pb.AdmitResponse.OUTCOME_TOO_LARGE,
}


def answer_of(plan: Plan, decision: Decision, *, degraded: bool = False) -> pb.AdmitResponse:
    """Render a decision."""
    response = pb.AdmitResponse(outcome=_OUTCOMES[decision.outcome], degraded=degraded)
    if decision.binding_idx >= 0:
        place = plan.places[decision.binding_idx]
        response.binding_level, response.binding_dimension = place.level, place.dimension
        response.retry_after_us = 0 if decision.wait_us == NEVER else decision.wait_us
    for place, charge, state in zip(plan.places, plan.charges, decision.states, strict=True):
        response.states.add(
            level=place.level,
            dimension=place.dimension,
            limit=charge.limit,
            remaining=state.remaining,
            reset_us=state.reset_us,
        )
    return response
