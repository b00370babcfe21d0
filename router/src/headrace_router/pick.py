"""Pure: the pipeline from a query to a choice. Gather, filter, let the policy choose, explain.

What does not depend on the request is gathered once per pass over a queue (`gathering.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace_common.errors import ModelNotFound, NoReplica
from headrace_common.kv_index import ReplicaKey
from headrace_router.breaker import Breakers
from headrace_router.candidate import Candidate, Query
from headrace_router.decode_prediction import DecodePredictor
from headrace_router.filters import excluded
from headrace_router.filters.room import NO_ROOM
from headrace_router.fleet_view import FleetView
from headrace_router.gathering import Gatherer
from headrace_router.load_guard import LoadBook
from headrace_router.pairs import Pair
from headrace_router.policies.policy import Policy
from headrace_router.prediction import PrefillPredictor
from headrace_router.replicas import ReplicaTable

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
    # Who computes the prompt for the chosen one; None = it does so itself.
    pair: Pair | None = None

    @property
    def predicted_ttft_s(self) -> float:
        """Seconds to the first token, whoever computes the prompt."""
        return self.chosen.predicted_ttft_s if self.pair is None else self.pair.pair_s


class Pipeline:
    """Chooses a replica for a query. Reads everything, changes nothing.

    Args:
        table: the replicas.
        mirror: confirmed blocks.
        loads: load and blocks in flight.
        predictor: seconds of prefill.
        decode: seconds of decode; None = one that never learns.
        breakers: which replicas fail; None = nobody looks.
    """

    def __init__(
        self,
        table: ReplicaTable,
        mirror: PrefixLookup,
        loads: LoadBook,
        predictor: PrefillPredictor,
        decode: DecodePredictor | None = None,
        breakers: Breakers | None = None,
    ) -> None:
        self._table, self._mirror, self._loads = table, mirror, loads
        self._gatherer = Gatherer(table, loads, predictor, decode or DecodePredictor(), breakers)

    def view(self, model: str, now_s: float) -> FleetView:
        """Gather what does not depend on the request."""
        self._loads.in_flight.expire(now_s)
        return self._gatherer.view(model, now_s)

    def mend(self, view: FleetView, key: ReplicaKey) -> None:
        """Look again at one replica, after a booking there."""
        self._gatherer.mend(view, key)

    def hits(self, query: Query, view: FleetView) -> list[int]:
        """Count the leading blocks that each replica of *view* holds or will soon, in its order."""
        held = self._mirror.depths(query.chain)
        coming = self._loads.in_flight.depths(query.chain)
        for key, depth in coming.items():
            held[key] = max(depth, held.get(key, 0))
        known = held.get
        return [known(one.replica.key, 0) for one in view.replicas]

    def choose(
        self, query: Query, policy: Policy, view: FleetView, hits: Sequence[int] | None = None
    ) -> Choice | None:
        """Return the choice, or None if the request should wait.

        Args:
            query: the request.
            policy: who chooses.
            view: the replicas.
            hits: from `hits` if it is known already.

        Raises:
            ModelNotFound: nobody serves the model.
            NoReplica: somebody does, but none of them may be picked now.
        """
        candidates = _candidates(query, view, self.hits(query, view) if hits is None else hits)
        fit = [one for one in candidates if not one.filtered_by]
        if not fit:
            self._refuse_hopeless(query, candidates)
            return None
        chosen = policy.choose(query, fit)
        if chosen is None:
            return None
        staleness_s = chosen.replica.report_age_s(view.now_s)
        return Choice(chosen, candidates, policy, staleness_s)

    def _refuse_hopeless(self, query: Query, candidates: list[Candidate]) -> None:
        if any(one.filtered_by == NO_ROOM for one in candidates):
            return
        if not candidates and not self._table.has_undescribed_models() and self._table.all():
            raise ModelNotFound(f"The model {query.model!r} is not served here.", param="model")
        raise NoReplica(
            f"No replica of {query.model!r} is ready. Try again.", retry_after_s=_RETRY_S
        )


def _candidates(query: Query, view: FleetView, hits: Sequence[int]) -> list[Candidate]:
    output_tokens = view.expected_output_tokens(query.expected_output_tokens)
    has_excluded, candidates = bool(query.excluded), []
    queued = (view.ahead, view.ahead_s, view.ahead_own_s)
    rows = zip(view.replicas, hits, *queued, strict=True)
    for one, hit_blocks, ahead, ahead_s, ahead_own_s in rows:
        load, replica = one.load, one.replica
        uncached_tokens = query.prompt_tokens - query.cached_tokens(hit_blocks)
        # By position, in the order of the class: half the time.
        candidate = Candidate(
            replica,
            (has_excluded and excluded.reason(query, replica.key)) or one.filtered_by,
            hit_blocks,
            uncached_tokens,
            one.backlog_s,
            uncached_tokens * one.token_s,
            output_tokens * one.step_s,
            load.backlog_tokens,
            load.tokens,
            load.num_requests,
            load.kv_tokens,
            replica.report.kv_capacity_tokens,
            one.is_withheld,
            ahead,
            ahead_s,
            ahead_own_s,
        )
        candidates.append(candidate)
    return candidates
