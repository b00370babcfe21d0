"""How limits stand, put together from an answer and the limits that were asked about."""

from __future__ import annotations

from functools import lru_cache
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
    # As a list at once: to step through protobuf's costs more.
    remaining = answer.remaining[:]
    if not remaining:
        return [
            LimitState(it.level, it.dimension, it.limit, it.remaining, it.reset_us)
            for it in answer.states
        ]
    rows = [row for scope in request.scopes for row in _rows(scope.SerializeToString())]
    return [
        LimitState(level, dimension, limit, left, reset_us)
        for (level, dimension, limit), left, reset_us in zip(
            rows, remaining, answer.reset_us[:], strict=False
        )
    ]


# A key's scopes change seldom.
@lru_cache(maxsize=4096)
def _rows(encoded: bytes) -> list[tuple[pb.Level.ValueType, pb.Dimension.ValueType, int]]:
    """Return level, dimension and size of each limit of a `Scope`."""
    scope = pb.Scope.FromString(encoded)
    # The fields of limits are numbered as their dimensions.
    return [
        (scope.level, pb.Dimension.ValueType(field.number), limit)
        for field, limit in scope.limits.ListFields()
    ]
