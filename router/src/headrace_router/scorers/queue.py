"""Pure: how few requests wait or run at a replica, between the most and the least busy candidate.

Inputs: requests. No parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace_router.candidate import Candidate, Query


def score(_query: Query, candidates: Sequence[Candidate]) -> list[float]:
    """Rate the least busy candidate 1 and the busiest 0; all alike = all 1."""
    counts = [one.num_requests for one in candidates]
    most, least = max(counts, default=0), min(counts, default=0)
    return [(most - count) / (most - least) if most > least else 1.0 for count in counts]
