"""The states of limits, put together from a brief answer and the limits that were asked about."""

from __future__ import annotations

from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb


def fill_states(request: pb.AdmitRequest, answer: pb.AdmitResponse) -> None:
    """Give an answer its states, if it has only their numbers."""
    if not answer.remaining:
        return
    numbers = zip(answer.remaining, answer.reset_us, strict=True)
    answer.states.extend(
        [
            pb.DimensionState(
                level=scope.level,
                # The fields of limits are numbered as their dimensions.
                dimension=pb.Dimension.ValueType(field.number),
                limit=limit,
                remaining=remaining,
                reset_us=reset_us,
            )
            for scope in request.scopes
            for (field, limit), (remaining, reset_us) in zip(
                scope.limits.ListFields(), numbers, strict=False
            )
        ]
    )
