"""Pure: the pipeline from a query to a choice. Gather, filter, let the policy choose, explain.

What does not depend on the request, the state and load of each replica, is gathered once per pass
over a queue (`FleetView`) and mended after each booking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace_common.errors import ModelNotFound, NoReplica
from headrace_common.kv_index import ReplicaKey
from headrace_router.candidate import Candidate, Query
from headrace_router.decode_prediction import DecodePredictor, StepTime
from headrace_router.filters import EXCLUDED, NO_ROOM, has_room, unavailable
from headrace_router.load_guard import Load, LoadBook
from headrace_router.policies.policy import Policy
from headrace_router.prediction import PrefillPredictor
from headrace_router.replicas import Replica, ReplicaTable

_RETRY_S = 1.0


class PrefixLookup(Protocol):
    """Whoever knows which replica holds which blocks."""

    def depths(self, chain: Sequence[int]) -> dict[ReplicaKey, int]:
        """Count the leading blocks of *chain* that each replica holds; zeros are left out."""
        ...


@dataclass(slots=True)
class Choice:
    """A replica and why it was chosen."""

    chosen: Candidate
    candidates: list[Candidate]
    policy: Policy
    # Age of the chosen replica's load report. Seconds.
    load_staleness_s: float
    # What the shadow policy would have chosen: its name and replica, None = let it wait.
    shadow: tuple[str, ReplicaKey | None] | None = None


@dataclass(slots=True)
class ReplicaView:
    """One replica at one moment, whoever asks."""

    replica: Replica
    # Name of the filter that drops it for everybody; empty = none.
    filtered_by: str
    load: Load
    # Predicted seconds per uncached token, of the queued prefill, and per decode step.
    token_s: float
    backlog_s: float
    step: StepTime


@dataclass(slots=True)
class FleetView:
    """All replicas of one model at one moment."""

    model: str
    now_s: float
    usual_rate: float
    usual_step: StepTime
    replicas: list[ReplicaView]

    def least_backlog_s(self) -> float:
        """Return the smallest backlog of those that may be picked; infinite if none may be."""
        return min(
            (one.backlog_s for one in self.replicas if not one.filtered_by), default=float("inf")
        )

    def is_hopeless(self) -> bool:
        """Whether no replica would take a request even with room."""
        return all(one.filtered_by not in ("", NO_ROOM) for one in self.replicas)


class Pipeline:
    """Chooses a replica for a query. Reads everything, changes nothing.

    Args:
        table: the replicas.
        mirror: confirmed blocks.
        loads: load and blocks in flight.
        predictor: seconds of prefill.
        decode: seconds of decode; None = one that never learns.
    """

    def __init__(
        self,
        table: ReplicaTable,
        mirror: PrefixLookup,
        loads: LoadBook,
        predictor: PrefillPredictor,
        decode: DecodePredictor | None = None,
    ) -> None:
        self._table, self._mirror = table, mirror
        self._loads, self._predictor = loads, predictor
        self._decode = decode or DecodePredictor()

    def view(self, model: str, now_s: float) -> FleetView:
        """Gather what does not depend on the request."""
        self._loads.in_flight.expire(now_s)
        serving = self._table.serving(model)
        rate = self._predictor.usual_rate(replica.report for replica in serving)
        step = self._decode.usual_step(replica.key for replica in serving)
        view = FleetView(model, now_s, rate, step, [])
        view.replicas = [self._view(replica, view) for replica in serving]
        return view

    def mend(self, view: FleetView, key: ReplicaKey) -> None:
        """Look again at one replica, after a booking there."""
        for idx, one in enumerate(view.replicas):
            if one.replica.key == key:
                view.replicas[idx] = self._view(one.replica, view)

    def choose(self, query: Query, policy: Policy, view: FleetView) -> Choice | None:
        """Return the choice, or None if the request should wait.

        Raises:
            ModelNotFound: nobody serves the model.
            NoReplica: somebody does, but none of them may be picked now.
        """
        candidates = self._candidates(query, view)
        fit = [one for one in candidates if not one.filtered_by]
        if not fit:
            self._refuse_hopeless(query, candidates)
            return None
        chosen = policy.choose(query, fit)
        if chosen is None:
            return None
        staleness_s = chosen.replica.report_age_s(view.now_s)
        return Choice(chosen, candidates, policy, staleness_s)

    def _view(self, replica: Replica, fleet: FleetView) -> ReplicaView:
        now_s = fleet.now_s
        load = self._loads.load(replica.key, replica.report if replica.is_fresh(now_s) else None)
        filtered_by = unavailable(replica, now_s)
        if not filtered_by and not has_room(replica, load):
            filtered_by = NO_ROOM
        token_s = self._predictor.seconds_per_token(replica.key, replica.report, fleet.usual_rate)
        step = self._decode.step(replica.key, fleet.usual_step)
        return ReplicaView(replica, filtered_by, load, token_s, load.backlog_tokens * token_s, step)

    def _candidates(self, query: Query, view: FleetView) -> list[Candidate]:
        held = self._mirror.depths(query.chain)
        coming = self._loads.in_flight.depths(query.chain)
        output_tokens = self._decode.output_tokens(query.model, query.expected_output_tokens)
        candidates = []
        for one in view.replicas:
            replica, load = one.replica, one.load
            key = replica.key
            hit_blocks = max(held.get(key, 0), coming.get(key, 0))
            uncached_tokens = query.prompt_tokens - query.cached_tokens(hit_blocks)
            candidates.append(
                Candidate(
                    replica,
                    EXCLUDED if key in query.excluded else one.filtered_by,
                    hit_blocks=hit_blocks,
                    uncached_tokens=uncached_tokens,
                    backlog_s=one.backlog_s,
                    own_s=uncached_tokens * one.token_s,
                    decode_s=one.step.output_s(load.num_requests + 1, output_tokens),
                    backlog_tokens=load.backlog_tokens,
                    load_tokens=load.tokens,
                    num_requests=load.num_requests,
                    kv_tokens=load.kv_tokens,
                    kv_capacity_tokens=replica.report.kv_capacity_tokens,
                )
            )
        return candidates

    def _refuse_hopeless(self, query: Query, candidates: list[Candidate]) -> None:
        if any(one.filtered_by == NO_ROOM for one in candidates):
            return
        if not candidates and not self._table.has_undescribed_models() and self._table.all():
            raise ModelNotFound(f"The model {query.model!r} is not served here.", param="model")
        raise NoReplica(
            f"No replica of {query.model!r} is ready. Try again.", retry_after_s=_RETRY_S
        )
