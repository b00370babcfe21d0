"""Pure: how little a replica has to do, relative to the busiest candidate.

Inputs: load in tokens. No parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace_router.candidate import Candidate, Query


def score(_query: Query, candidates: Sequence[Candidate]) -> list[float]:
    """Rate each candidate by 1 - load / largest load; all idle = all 1."""
    largest = max((one.load_tokens for one in candidates), default=0)
    return [1 - one.load_tokens / largest if largest else 1.0 for one in candidates]
