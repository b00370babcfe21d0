"""Pure: `session`: a session stays where it began, whatever the load.

Rendezvous hashing over the session id, without any memory: every router agrees, and a replica that
leaves moves only its own sessions. A request without a session goes to the replica with the fewest
requests. No parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from headrace_router.candidate import Candidate, Query
from headrace_router.policies.policy import FirstComeFirstServed, cheapest
from headrace_router.scorers import session


class SessionPolicy(FirstComeFirstServed):
    """See the module.

    Args:
        random: what spreads requests without a session.
    """

    name = "session"

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the session's replica, or the least busy one."""
        if not query.session_id:
            return cheapest(
                query, candidates, lambda one: one.num_requests, self._random, least=0.5
            )
        for one, weight in zip(candidates, session.score(query, candidates), strict=True):
            one.scores["session"] = one.total_score = weight
        return max(candidates, key=lambda one: one.total_score)
