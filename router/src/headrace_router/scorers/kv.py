"""Pure: the share of a replica's KV that no running request holds.

Inputs: load and KV capacity in tokens; a replica that has not told its capacity is rated 1.
No parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace_router.candidate import Candidate, Query


def score(_query: Query, candidates: Sequence[Candidate]) -> list[float]:
    """Rate each candidate by its free share."""
    return [
        max(1 - one.load_tokens / one.kv_capacity_tokens, 0.0) if one.kv_capacity_tokens else 1.0
        for one in candidates
    ]
