"""How limits stand, put together from an answer and the limits that were asked about."""

from __future__ import annotations

from typing import NamedTuple

from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb


class LimitState(NamedTuple):
    """A `ratelimit.v1.DimensionState`; its contract says what the fields mean."""

    level: pb.Level.ValueType
    dimension: pb.Dimension.ValueType
    limit: int
    remaining: int
    reset_us: int


def states_of(request: pb.AdmitRequest, answer: pb.AdmitResponse) -> list[LimitState]:
    """Return the states that an answer tells, in full or by their numbers alone."""
    if not answer.remaining:
        return [
            LimitState(it.level, it.dimension, it.limit, it.remaining, it.reset_us)
            for it in answer.states
        ]
    numbers = zip(answer.remaining, answer.reset_us, strict=True)
    return [
        # The fields of limits are numbered as their dimensions.
        LimitState(scope.level, pb.Dimension.ValueType(field.number), limit, remaining, reset_us)
        for scope in request.scopes
        for (field, limit), (remaining, reset_us) in zip(
            scope.limits.ListFields(), numbers, strict=False
        )
    ]
