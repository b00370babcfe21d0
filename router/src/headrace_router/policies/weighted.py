"""Pure: `weighted` and `least-load`: the highest weighted sum of scorers' ratings, at once.

The way of llm-d's router: each scorer rates all candidates from 0 to 1, the policy file gives the
weights. `least-load` is the same with the load scorer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Final

from headrace_router.candidate import Candidate, Query
from headrace_router.picker import near_best, pick_one
from headrace_router.policies.policy import FirstComeFirstServed
from headrace_router.scorers import kv, load, prefix, queue, session

Scorer = Callable[[Query, Sequence[Candidate]], list[float]]
SCORERS: Final[dict[str, Scorer]] = {
    "prefix": prefix.score,
    "load": load.score,
    "queue": queue.score,
    "kv": kv.score,
    "session": session.score,
}
# Sums this close are equal.
_NEAR_SCORE = 0.01


class WeightedPolicy(FirstComeFirstServed):
    """See the module.

    Args:
        name: what explanations call it.
        weights: scorer -> weight; scorers with weight 0 are not asked.
        random: what spreads near-equals.
    """

    def __init__(self, name: str, weights: Mapping[str, float], random: Random) -> None:
        self.name = name
        self._weights = [
            (SCORERS[scorer], scorer, weight) for scorer, weight in weights.items() if weight
        ]
        self._random = random

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the best replica."""
        totals = [0.0] * len(candidates)
        for scorer, name, weight in self._weights:
            for idx, value in enumerate(scorer(query, candidates)):
                candidates[idx].scores[name] = value
                totals[idx] += weight * value
        for one, total in zip(candidates, totals, strict=True):
            one.total_score = total
        costs = [-total for total in totals]
        equals = near_best(candidates, costs, ratio=0.0, least=_NEAR_SCORE)
        return pick_one(query, equals, self._random)
