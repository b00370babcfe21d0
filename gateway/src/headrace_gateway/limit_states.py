"""How limits stand, put together from an answer and the limits that were asked about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb

# Level, dimension and size of a limit.
Limit: TypeAlias = tuple[pb.Level.ValueType, pb.Dimension.ValueType, int]


class Standing(NamedTuple):
    """What `ratelimit.v1.DimensionState` says of each limit; its contract says what that means."""

    limits: tuple[Limit, ...] = ()
    # Of each.
    remaining: Sequence[int] = ()
    reset_us: Sequence[int] = ()


def limits_of(scopes: Iterable[pb.Scope]) -> tuple[Limit, ...]:
    """Return the limits of some scopes, in the order in which answers tell of them."""
    # The fields of limits are numbered as their dimensions.
    return tuple(
        (scope.level, pb.Dimension.ValueType(field.number), limit)
        for scope in scopes
        for field, limit in scope.limits.ListFields()
    )


def standing_of(limits: tuple[Limit, ...], answer: pb.AdmitResponse) -> Standing:
    """Return what an answer tells of the limits asked about, in full or by numbers alone."""
    # As a list at once: to step through protobuf's costs more.
    remaining = answer.remaining[:]
    if remaining:
        return Standing(limits[: len(remaining)], remaining, answer.reset_us[:])
    states = answer.states
    return Standing(
        tuple((it.level, it.dimension, it.limit) for it in states),
        [it.remaining for it in states],
        [it.reset_us for it in states],
    )
