"""Pure: `min-ttft`: the shortest predicted time to first token, at once.

Backlog + own prefill, as Mooncake's conductor does (arXiv 2407.00079, section 6). It takes no
account of what a recomputed prefix costs the others. No parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from headrace_router.candidate import Candidate, Query
from headrace_router.policies.policy import FirstComeFirstServed, cheapest


class MinTtftPolicy(FirstComeFirstServed):
    """See the module.

    Args:
        random: what spreads near-equals.
    """

    name = "min-ttft"

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the replica with the earliest first token."""
        return cheapest(query, candidates, lambda one: one.predicted_ttft_s, self._random)
