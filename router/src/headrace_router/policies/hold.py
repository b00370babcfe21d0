"""Pure: `hold`, the default: wait in the router for the replica where the request costs least.

cost = backlog + (1 + own_weight) x own + decode_weight x decode, all predicted seconds::

    backlog   prefill that is queued at the replica
    own       prefill of this request's uncached tokens; weighted, since recomputing a prefix
              takes capacity from everybody, not only from this request; on a replica that runs
              little there is nobody to take it from, so the weight grows with its requests
    decode    how long its output takes beside the streams that run there, those included that
              wait in this router and want the same replica: what makes a hot prefix get a second
              home while its first one is busy generating

Predictions can be wrong by far, counts of requests cannot. So a replica that is crowded beside the
least busy one (`max_ratio`, `max_difference`) gets no more, whatever is cached there, unless that
one has much to do or no room; beside peers that are as busy nobody is crowded, so affinity is never
switched off.

While the cheapest replica has more backlog than `slack_s`, or no room for the prompt's KV, the
request stays in the queue: later it costs less there, and recomputing elsewhere would cost the
fleet. Of those that may go the smallest own - ageing_ratio x waited goes first. Late binding and
that order each help, together most (docs/routing-simulation.md). A newcomer that finds an opening
takes it at once, unless another tenant waits, or its work is long and the replica busy: then it
waits for `gather_s`, in which shorter work of the same burst goes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from headrace_router.candidate import Candidate, Query
from headrace_router.fleet_view import FleetView, Outlook
from headrace_router.picker import near_best, pick_one
from headrace_router.policies.policy import NEAR_RATIO, NEAR_S

# Requests at a replica from which on work there takes capacity from others in full.
_BUSY_REQUESTS = 4
# An idle replica counts for so busy, or a burst of equal new prompts would scatter over the fleet.
_IDLE_RATIO = 0.25
# Nobody waits for a replica beside crowded ones that has more prefill than this before it. Seconds.
_NEAR_OPEN_S = 5.0
# Work is long that takes so many times the gathering.
_GATHER_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class HoldParameters:
    """Knobs of `hold`; the defaults come from simulation on a real trace."""

    # The request's own prefill counts 1 + this many times against a replica's backlog.
    own_weight: float = 2.0
    # Seconds of own work that one second of waiting is worth.
    ageing_ratio: float = 0.2
    # Predicted prefill backlog at which a replica still takes a request. Seconds.
    slack_s: float = 0.1
    # What a second of decode counts against a second of backlog.
    decode_weight: float = 0.5
    # What a second of those counts that wait in the router before this one, for the same replica.
    queue_weight: float = 1.0
    # A replica with more requests, waiting ones included, than `max_ratio` times those of the least
    # busy one and `max_difference` gets no more.
    max_ratio: float = 2.0
    max_difference: int = 10
    # How long a newcomer with long work waits on a busy fleet for shorter work. Seconds.
    gather_s: float = 0.005


class HoldPolicy:
    """See the module.

    Args:
        parameters: the knobs.
        random: what spreads near-equals.
    """

    name = "hold"

    def __init__(self, parameters: HoldParameters, random: Random) -> None:
        self._own_weight = parameters.own_weight
        self._decode_weight = parameters.decode_weight
        self._ageing_ratio, self._slack_s = parameters.ageing_ratio, parameters.slack_s
        self._queue_weight, self._gather_s = parameters.queue_weight, parameters.gather_s
        self._max_ratio, self._max_difference = parameters.max_ratio, parameters.max_difference
        self._random = random

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the cheapest replica, or None while it is busy."""
        costs = [
            one.backlog_s
            + self._weight(one.num_requests) * one.own_s
            + self._decode_weight * one.decode_s
            + self._queue_weight * one.ahead_s
            for one in candidates
        ]
        for one, cost in zip(candidates, costs, strict=True):
            one.total_score = -cost
        places = self._not_crowded(candidates)
        if len(places) < len(candidates):
            candidates, costs = [candidates[i] for i in places], [costs[i] for i in places]
        equals = near_best(candidates, costs, ratio=NEAR_RATIO, least=NEAR_S)
        open_ones = [
            one
            for one in equals
            if one.backlog_s <= self._slack_s and not one.is_withheld and one.has_kv_room()
        ]
        return pick_one(query, open_ones, self._random) if open_ones else None

    def _not_crowded(self, candidates: Sequence[Candidate]) -> Sequence[int]:
        """Return the places of those that are not crowded and soon open; of all if none is."""
        counts = [one.num_requests + one.ahead for one in candidates]
        limit = self._crowd(min(counts))
        everyone = range(len(candidates))
        if max(counts) <= limit:
            return everyone
        return [
            idx
            for idx, one in enumerate(candidates)
            if counts[idx] <= limit
            and one.backlog_s + one.ahead_own_s <= _NEAR_OPEN_S
            and one.has_kv_room()
        ] or everyone

    def may_release(self, view: FleetView) -> bool:
        """Only to a replica with little backlog."""
        return any(
            one.backlog_s <= self._slack_s and not one.is_withheld and not one.filtered_by
            for one in view.replicas
        )

    def outlook(self, query: Query, view: FleetView, hits: Sequence[int]) -> Outlook:
        """The same costs as in `choose`, without room for KV and without explanations."""
        fit = [idx for idx, one in enumerate(view.replicas) if not one.filtered_by]
        if query.excluded or not fit:
            return Outlook(must_wait=False)
        uncached = [query.prompt_tokens - query.cached_tokens(one) for one in hits]
        fit = self._level(view, fit, uncached)
        output_tokens = view.expected_output_tokens(query.expected_output_tokens)
        decode_weight = self._decode_weight * output_tokens
        least = least_open = float("inf")
        wanted, seconds, wanted_own_s = -1, 0.0, 0.0
        for idx in fit:
            one = view.replicas[idx]
            num_requests = one.load.num_requests
            own_s = uncached[idx] * one.token_s
            cost = (
                one.backlog_s
                + self._weight(num_requests) * own_s
                + decode_weight * one.step_s
                + self._queue_weight * view.ahead_s[idx]
            )
            if cost < least:
                least, wanted = cost, idx
                seconds, wanted_own_s = decode_weight * one.stream_s, own_s
            if one.backlog_s <= self._slack_s and not one.is_withheld:
                least_open = min(least_open, cost)
        # A little more than `near_best`, as sums round differently there.
        must_wait = least_open > least + max(NEAR_RATIO * least, NEAR_S) + 1e-6
        return Outlook(must_wait, wanted, seconds, wanted_own_s)

    def _level(self, view: FleetView, fit: list[int], uncached: Sequence[int]) -> list[int]:
        """Drop replicas that are crowded beside one that is open soon, by places in the view."""
        counts = [view.replicas[i].load.num_requests + view.ahead[i] for i in fit]
        limit = self._crowd(min(counts))
        if max(counts) <= limit:
            return fit
        return [
            idx
            for idx, count in zip(fit, counts, strict=True)
            if count <= limit
            and view.replicas[idx].backlog_s + view.ahead_own_s[idx] <= _NEAR_OPEN_S
            and view.replicas[idx].has_kv_room(uncached[idx])
        ] or fit

    def _crowd(self, least: int) -> float:
        """Return the requests beyond which a replica is crowded, beside one with the *least*."""
        return self._max_ratio * least + self._max_difference

    def _weight(self, num_requests: int) -> float:
        busy_ratio = min(num_requests / _BUSY_REQUESTS, 1.0)
        return 1 + self._own_weight * max(busy_ratio, _IDLE_RATIO)

    def gather_s(self, chosen: Candidate) -> float:
        """Long work on a busy replica: some milliseconds, in which shorter work may arrive."""
        is_long = chosen.own_s >= _GATHER_RATIO * self._gather_s
        return self._gather_s if is_long and chosen.num_requests else 0.0

    def urgency(self, chosen: Candidate, waited_s: float) -> float:
        """Shortest own work first, with age."""
        return chosen.own_s - self._ageing_ratio * waited_s
