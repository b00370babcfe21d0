"""Pure: one of several that are about equally good.

Always taking the very best sends every router, and every tie, to the same replica; so among
near-equals a session keeps its replica, and everything else is spread at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from headrace_router.candidate import Candidate, Query
from headrace_router.scorers import session


def near_best(
    candidates: Sequence[Candidate], costs: Sequence[float], *, ratio: float, least: float
) -> list[Candidate]:
    """Return the candidates whose cost exceeds the lowest by at most *ratio* of it, or *least*."""
    lowest = min(costs)
    limit = lowest + max(ratio * abs(lowest), least)
    return [one for one, cost in zip(candidates, costs, strict=True) if cost <= limit]


def pick_one(query: Query, equals: Sequence[Candidate], random: Random) -> Candidate:
    """Pick the session's own replica among *equals*, or any."""
    if query.session_id:
        weights = session.score(query, equals)
        return equals[weights.index(max(weights))]
    return equals[random.randrange(len(equals))]
