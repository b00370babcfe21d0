"""Pure: `random`: any replica, all alike. No parameters; the router's seed makes it repeatable."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from headrace_router.candidate import Candidate, Query
from headrace_router.policies.policy import FirstComeFirstServed


class RandomPolicy(FirstComeFirstServed):
    """See the module.

    Args:
        random: where choices come from.
    """

    name = "random"

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return any replica."""
        return candidates[self._random.randrange(len(candidates))]
