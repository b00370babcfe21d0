"""Pure: all replicas of a model at one moment, as far as no request matters.

Gathered once per pass over a queue and mended after each booking, so that looking at a waiting
request costs little more than a few multiplications per replica.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace_common.kv_index import ReplicaKey
from headrace_router.decode_prediction import StepTime
from headrace_router.filters.room import NO_ROOM
from headrace_router.load_guard import Load
from headrace_router.replicas import Replica


@dataclass(slots=True)
class ReplicaView:
    """One replica at one moment, whoever asks. Several views may share it: it never changes."""

    replica: Replica
    # Name of the filter that drops it for everybody; empty = none.
    filtered_by: str
    load: Load
    # Predicted seconds: per uncached token, of the queued prefill, per step with one more stream.
    token_s: float
    backlog_s: float
    step_s: float
    # Another router may fill its opening; no request of this one goes there in this pass.
    is_withheld: bool = False


@dataclass(slots=True)
class FleetView:
    """All replicas of one model at one moment."""

    model: str
    now_s: float
    # Changes when replicas come, go or change their state.
    version: int
    # What peers that have not generated yet are taken to need.
    usual_step: StepTime
    # How long an output of this model usually is.
    output_tokens: float
    replicas: list[ReplicaView]

    def least_backlog_s(self) -> float:
        """Return the smallest backlog of those that may be picked; infinite if none may be."""
        return min(
            (one.backlog_s for one in self.replicas if not one.filtered_by), default=float("inf")
        )

    def withhold(self, key: ReplicaKey) -> None:
        """Let nothing go to a replica in this pass."""
        for idx, one in enumerate(self.replicas):
            if one.replica.key == key:
                self.replicas[idx] = replace(one, is_withheld=True)

    def is_hopeless(self) -> bool:
        """Whether no replica would take a request even with room."""
        return all(one.filtered_by not in ("", NO_ROOM) for one in self.replicas)

    def expected_output_tokens(self, limit_tokens: int) -> float:
        """Return how long an output will be; *limit_tokens* is its bound, 0 = unknown."""
        return min(self.output_tokens, limit_tokens) if limit_tokens else self.output_tokens
