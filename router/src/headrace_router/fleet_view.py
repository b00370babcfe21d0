"""Pure: all replicas of a model at one moment, as far as no request matters.

Gathered once per pass over a queue and mended after each booking, so that looking at a waiting
request costs little more than a few multiplications per replica.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from headrace_common.kv_index import ReplicaKey
from headrace_router.decode_prediction import StepTime
from headrace_router.filters.room import NO_ROOM
from headrace_router.load_guard import Load
from headrace_router.replicas import Replica


class Outlook(NamedTuple):
    """What a request that waits is to expect."""

    # It would wait on; False is always right.
    must_wait: bool
    # The replica it wants, by its place in the view; -1 = it does not matter.
    wanted: int = -1
    # What it costs those behind it who want the same replica, and its own prefill there.
    seconds: float = 0.0
    own_s: float = 0.0


@dataclass(slots=True)
class ReplicaView:
    """One replica at one moment, whoever asks. Several views may share it: it never changes."""

    replica: Replica
    # Name of the filter that drops it for everybody; empty = none.
    filtered_by: str
    load: Load
    # Predicted seconds: per uncached token, of the queued prefill, per step with one more stream,
    # and what each stream adds to a step.
    token_s: float
    backlog_s: float
    step_s: float
    stream_s: float
    # Another router may fill its opening; no request of this one goes there in this pass.
    is_withheld: bool = False

    def has_kv_room(self, uncached_tokens: int) -> bool:
        """As `Candidate.has_kv_room`, for a prompt with so much to compute."""
        capacity_tokens, load = self.replica.report.kv_capacity_tokens, self.load
        if not capacity_tokens or not load.num_requests:
            return True
        return load.kv_tokens + uncached_tokens <= capacity_tokens


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
    # Of requests that wait in this router, asked before the one that is asked now, and that want
    # the replica: how many they are, what that adds to its cost, and their prefill. Seconds.
    ahead: list[int] = field(init=False)
    ahead_s: list[float] = field(init=False)
    ahead_own_s: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.forget_queue()

    def forget_queue(self) -> None:
        """Nobody is ahead: a look at the queue begins."""
        count = len(self.replicas)
        self.ahead, self.ahead_s, self.ahead_own_s = [0] * count, [0.0] * count, [0.0] * count

    def queue_up(self, outlook: Outlook) -> None:
        """Let a waiting request be ahead of those that are asked later."""
        if outlook.wanted >= 0:
            self.ahead[outlook.wanted] += 1
            self.ahead_s[outlook.wanted] += outlook.seconds
            self.ahead_own_s[outlook.wanted] += outlook.own_s

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
