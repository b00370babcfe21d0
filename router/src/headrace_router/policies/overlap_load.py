"""Pure: `overlap-load`: uncached prefill work against running KV, in blocks.

cost = prefill_weight x (queued prefill blocks + this request's uncached blocks) + blocks of the
running requests: the rule of Dynamo's KV router. With a weight of 1 a cached block is worth as
much as one block of somebody's running stream; 2 favours the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from headrace_router.candidate import Candidate, Query
from headrace_router.policies.policy import FirstComeFirstServed, cheapest


class OverlapLoadPolicy(FirstComeFirstServed):
    """See the module.

    Args:
        prefill_weight: what a block to be computed counts against a running one.
        random: what spreads near-equals.
    """

    name = "overlap-load"

    def __init__(self, prefill_weight: float, random: Random) -> None:
        self._prefill_weight, self._random = prefill_weight, random

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the replica with the least weighted work."""

        def cost(one: Candidate) -> float:
            running = max(one.load_tokens - one.backlog_tokens, 0)
            prefill = one.backlog_tokens + one.uncached_tokens
            return (self._prefill_weight * prefill + running) / query.block_size_tokens

        return cheapest(query, candidates, cost, self._random, least=0.5)
