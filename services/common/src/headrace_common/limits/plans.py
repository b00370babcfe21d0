"""From the contract to charges and back.

A request's charges stand in the order of its scopes and, within one, of the table below; that order
breaks ties between equal waits, and states come back in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from headrace_common.errors import InvalidRequest
from headrace_common.limits.limiter import (
    MAX_COST,
    MAX_NANO_USD,
    MAX_RATE_LIMIT,
    MINUTE_US,
    NEVER,
    Amounts,
    Charge,
    Decision,
    Kind,
    Measure,
    Mode,
    Outcome,
)
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb

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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a charge comes from."""

    level: pb.Level.ValueType
    dimension: pb.Dimension.ValueType
    scope_id: str


class ChargeSet:
    """The charges of a list of scopes, checked and encoded once.

    Args:
        charges: in order.
        places: where each comes from.
    """

    __slots__ = (
        "budgets",
        "charges",
        "compared",
        "counted",
        "names",
        "packed",
        "places",
        "rows",
        "shares",
        "sizes",
    )

    def __init__(self, charges: tuple[Charge, ...], places: tuple[Place, ...]) -> None:
        self.charges, self.places = charges, places
        self.names = tuple(it.name for it in charges)
        # As the script takes them.
        self.packed = msgspec.msgpack.encode(flat_charges(charges))
        # What an answer needs of each: level, dimension, limit, whether it is a rate.
        self.rows = tuple(
            (place.level, place.dimension, charge.limit, charge.kind is Kind.RATE)
            for charge, place in zip(charges, places, strict=True)
        )
        # Its limit, and for a rate what that is in 1/limit microseconds; 0 = not a rate.
        self.sizes = tuple((it[2], it[2] * MINUTE_US if it[3] else 0) for it in self.rows)
        # When their budgets were last compared with the ledger; the rebuilder's own count.
        self.compared = 0
        # What the local share makes of the charges; its own note. None = not yet asked.
        self.shares: tuple[Charge, ...] | None = None
        # Positions of those that count money.
        self.budgets = tuple(idx for idx, it in enumerate(charges) if it.kind.is_budget)
        # Of those that count what was used of late.
        counted = (Kind.RATE, Kind.DAY_COUNT)
        self.counted = tuple(idx for idx, it in enumerate(charges) if it.kind in counted)


def flat_charges(charges: Sequence[Charge]) -> list[int | str]:
    """Return charges as the script takes them."""
    return [
        value
        for charge in charges
        for value in (charge.kind.value, charge.measure.value, charge.limit, charge.scope)
    ]


class Plan(NamedTuple):
    """A checked request to admit."""

    tenant_id: str
    lease_id: str
    lease_us: int
    prepaid: bool
    charges: ChargeSet
    amounts: Amounts
    mode: Mode = Mode.NORMAL
    # Numbers will do for an answer.
    brief: bool = False


class Plans:
    """Makes plans of requests. Scopes seen lately are neither checked nor encoded again."""

    def __init__(self, max_sets: int = 10_000) -> None:
        self._max_sets = max_sets
        self._sets: OrderedDict[tuple[str | bytes, ...], ChargeSet] = OrderedDict()

    def of(self, request: pb.AdmitRequest) -> Plan:
        """Check a request and list its charges.

        Raises:
            InvalidRequest: something is missing, or too large to be counted exactly.
        """
        check_id("tenant_id", request.tenant_id)
        mode = Mode.PEEK if request.peek else Mode.RESTORE if request.restore else Mode.NORMAL
        if mode is not Mode.PEEK:
            check_id("lease_id", request.lease_id)
            check_lease_ms(request.lease_ms)
        return Plan(
            request.tenant_id,
            request.lease_id,
            request.lease_ms * 1000,
            request.prepaid,
            self.charges(request),
            amounts_of(request.reserve),
            mode,
            request.brief,
        )

    def charges(self, request: pb.AdmitRequest) -> ChargeSet:
        """List the charges of a request; raises as `of` does."""
        scopes = [scope.SerializeToString() for scope in request.scopes]
        key: tuple[str | bytes, ...] = (request.tenant_id, *scopes)
        known = self._sets.get(key)
        if known is None:
            known = self._sets[key] = _charge_set(request)
            if len(self._sets) > self._max_sets:
                self._sets.popitem(last=False)
        return known


def _charge_set(request: pb.AdmitRequest) -> ChargeSet:
    if len(request.scopes) > MAX_SCOPES:
        raise InvalidRequest(f"A request has at most {MAX_SCOPES} scopes.", param="scopes")
    pairs = [pair for scope in request.scopes for pair in _charges_of(scope)]
    if len({charge.name for _, charge in pairs}) != len(pairs):
        raise InvalidRequest("A scope is given twice.", param="scopes")
    return ChargeSet(
        tuple(charge for _, charge in pairs),
        tuple(place for place, _ in pairs),
    )


def _charges_of(scope: pb.Scope) -> Iterator[tuple[Place, Charge]]:
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
            Place(scope.level, dimension.number, scope.scope_id),
            Charge(
                scope=f"{scope.level}:{scope.scope_id}",
                kind=dimension.kind,
                measure=dimension.measure,
                limit=limit,
            ),
        )


def amounts_of(amounts: pb.Amounts) -> Amounts:
    """Check amounts.

    Raises:
        InvalidRequest: too large to be counted exactly, or more cached than there is.
    """
    it = Amounts(
        amounts.requests,
        amounts.input_tokens,
        amounts.output_tokens,
        amounts.cost_nano_usd,
        amounts.cached_input_tokens,
    )
    bound = MAX_COST // 2
    if it.requests > bound or it.input_tokens > bound or it.output_tokens > bound:
        names = ("requests", "input_tokens", "output_tokens")
        name = next(name for name in names if getattr(it, name) > MAX_COST // 2)
        raise InvalidRequest(f"{name} is at most {MAX_COST // 2}.", param=name)
    if it.cost_nano_usd > MAX_NANO_USD:
        raise InvalidRequest(f"cost_nano_usd is at most {MAX_NANO_USD}.", param="cost_nano_usd")
    if it.cached_input_tokens > it.input_tokens:
        raise InvalidRequest(
            "cached_input_tokens are part of input_tokens.", param="cached_input_tokens"
        )
    return it


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


_OUTCOMES = {
    Outcome.ADMITTED: pb.AdmitResponse.OUTCOME_ADMITTED,
    Outcome.DENIED: pb.AdmitResponse.OUTCOME_DENIED,
    Outcome.TOO_LARGE: pb.AdmitResponse.OUTCOME_TOO_LARGE,
}


def answer_of(
    plan: Plan,
    decision: Decision,
    *,
    charges: Sequence[Charge] | None = None,
    degraded: bool = False,
) -> pb.AdmitResponse:
    """Render a decision; *charges* are those of the plan, unless its limits were shared out."""
    charges, places = charges or plan.charges.charges, plan.charges.places
    response = pb.AdmitResponse(outcome=_OUTCOMES[decision.outcome], degraded=degraded)
    if decision.binding_idx >= 0:
        place = places[decision.binding_idx]
        response.binding_level, response.binding_dimension = place.level, place.dimension
        response.retry_after_us = 0 if decision.wait_us == NEVER else decision.wait_us
    response.states.extend(
        [
            pb.DimensionState(
                level=place.level,
                dimension=place.dimension,
                limit=charge.limit,
                remaining=state.remaining,
                reset_us=state.reset_us,
            )
            for place, charge, state in zip(places, charges, decision.states, strict=True)
        ]
    )
    return response
