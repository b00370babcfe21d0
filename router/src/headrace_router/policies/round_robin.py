"""Pure: `round-robin`: one after the other, by worker id. No parameters."""

from __future__ import annotations

from collections.abc import Sequence

from headrace_router.candidate import Candidate, Query
from headrace_router.policies.policy import FirstComeFirstServed


class RoundRobinPolicy(FirstComeFirstServed):
    """See the module."""

    name = "round-robin"

    def __init__(self) -> None:
        self._last = ""

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the next replica after the one chosen last."""
        in_order = sorted(candidates, key=lambda one: one.key)
        later = (one for one in in_order if one.key.worker_id > self._last)
        chosen = next(later, in_order[0])
        self._last = chosen.key.worker_id
        return chosen
