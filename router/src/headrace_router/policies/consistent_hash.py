"""Pure: `consistent-hash`: the head of the prompt names the replica, as long as it is not too busy.

Rendezvous hashing over the first `head_blocks` blocks (a prompt without a full block goes by
session, then by tenant), with bounded load (Mirrokni, Thorup and Zadimoghaddam, 2016): a replica
with more than `max_load_ratio` times the mean of running requests is passed over. It needs no
index. A head of one block would send everything with a common system prompt to one replica.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace_router.candidate import Candidate, Query
from headrace_router.policies.policy import FirstComeFirstServed
from headrace_router.scorers.session import rendezvous_weight


@dataclass(frozen=True, slots=True)
class ConsistentHashParameters:
    """Knobs of `consistent-hash`."""

    head_blocks: int = 8
    max_load_ratio: float = 1.25


class ConsistentHashPolicy(FirstComeFirstServed):
    """See the module.

    Args:
        parameters: the knobs.
    """

    name = "consistent-hash"

    def __init__(self, parameters: ConsistentHashParameters) -> None:
        self._parameters = parameters

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the first replica in the prompt's own order that is not overloaded."""
        text = head_text(query, self._parameters.head_blocks)
        for one in candidates:
            one.total_score = rendezvous_weight(text, one.key.worker_id)
        num_running = sum(one.num_requests for one in candidates)
        bound = math.ceil(self._parameters.max_load_ratio * (num_running + 1) / len(candidates))
        level = [one for one in candidates if one.num_requests < bound]
        return max(level or candidates, key=lambda one: one.total_score)


def head_text(query: Query, head_blocks: int) -> str:
    """Return what a prompt's place is derived from."""
    if query.chain:
        # The chain is hashed over its parents: its last block stands for all before it.
        return f"block {query.chain[:head_blocks][-1]}"
    return f"session {query.session_id}" if query.session_id else f"tenant {query.tenant_id}"
