"""Pure: the share of the prompt that a replica already holds.

Inputs: hit blocks, confirmed or in flight. No parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace_router.candidate import Candidate, Query


def score(query: Query, candidates: Sequence[Candidate]) -> list[float]:
    """Rate each candidate by cached / prompt tokens."""
    return [query.cached_tokens(one.hit_blocks) / query.prompt_tokens for one in candidates]
