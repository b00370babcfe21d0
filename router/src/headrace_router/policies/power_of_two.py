"""Pure: `power-of-two`: the less busy one of two replicas drawn at random.

Mitzenmacher, "The power of two choices in randomized load balancing" (2001): nearly as level as
asking everybody, and many routers with old news do not all run to the same replica. Busy is the
number of requests. No parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from headrace_router.candidate import Candidate, Query
from headrace_router.policies.policy import FirstComeFirstServed


class PowerOfTwoPolicy(FirstComeFirstServed):
    """See the module.

    Args:
        random: where the draws come from.
    """

    name = "power-of-two"

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the less busy one of two."""
        drawn = self._random.sample(candidates, min(2, len(candidates)))
        for one in drawn:
            one.total_score = -float(one.num_requests)
        return min(drawn, key=lambda one: one.num_requests)
