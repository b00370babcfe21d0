"""Pure: the pipeline from a query to a choice. Gather, filter, let the policy choose, explain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace_common.errors import ModelNotFound, NoReplica
from headrace_common.kv_index import ReplicaKey
from headrace_router.candidate import Candidate, Query
from headrace_router.filters import NO_ROOM, has_room, unfit
from headrace_router.load_guard import LoadBook
from headrace_router.policies import Policy
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


class Pipeline:
    """Chooses a replica for a query. Reads everything, changes nothing.

    Args:
        table: the replicas.
        mirror: confirmed blocks.
        loads: load and blocks in flight.
        predictor: seconds of prefill.
    """

    def __init__(
        self,
        table: ReplicaTable,
        mirror: PrefixLookup,
        loads: LoadBook,
        predictor: PrefillPredictor,
    ) -> None:
        self._table, self._mirror = table, mirror
        self._loads, self._predictor = loads, predictor

    def choose(self, query: Query, policy: Policy, now_s: float) -> Choice | None:
        """Return the choice, or None if the request should wait.

        Raises:
            ModelNotFound: nobody serves the model.
            NoReplica: somebody does, but none of them may be picked now.
        """
        candidates = self._candidates(query, now_s)
        fit = [one for one in candidates if not one.filtered_by]
        if not fit:
            self._refuse_hopeless(query, candidates)
            return None
        chosen = policy.choose(query, fit)
        if chosen is None:
            return None
        staleness_s = chosen.replica.report_age_s(now_s)
        return Choice(chosen, candidates, policy, staleness_s)

    def _candidates(self, query: Query, now_s: float) -> list[Candidate]:
        self._loads.in_flight.expire(now_s)
        held = self._mirror.depths(query.chain)
        coming = self._loads.in_flight.depths(query.chain)
        candidates = []
        serving = self._table.serving(query.model)
        usual_rate = self._predictor.usual_rate(replica.report for replica in serving)
        for replica in serving:
            one = Candidate(replica, unfit(replica, query, now_s))
            candidates.append(one)
            report = replica.report if replica.is_fresh(now_s) else None
            load = self._loads.load(replica.key, report)
            if not one.filtered_by and not has_room(replica, load):
                one.filtered_by = NO_ROOM
            one.hit_blocks = max(held.get(replica.key, 0), coming.get(replica.key, 0))
            one.uncached_tokens = query.prompt_tokens - query.cached_tokens(one.hit_blocks)
            token_s = self._predictor.seconds_per_token(replica.key, replica.report, usual_rate)
            one.own_s = one.uncached_tokens * token_s
            one.backlog_s = load.backlog_tokens * token_s
            one.load_tokens = load.tokens
        return candidates

    def _refuse_hopeless(self, query: Query, candidates: list[Candidate]) -> None:
        if any(one.filtered_by == NO_ROOM for one in candidates):
            return
        if not candidates and not self._table.has_undescribed_models() and self._table.all():
            raise ModelNotFound(f"The model {query.model!r} is not served here.", param="model")
        raise NoReplica(
            f"No replica of {query.model!r} is ready. Try again.", retry_after_s=_RETRY_S
        )
