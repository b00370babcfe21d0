"""Pure: what is asked of the router, and one replica as seen for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace_common.kv_index import ReplicaKey
from headrace_router.replicas import Replica

# Classes of service, as in the contract.
BATCH, STANDARD, HIGH = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Query:
    """One request for a replica."""

    request_id: str
    model: str
    # Block hashes of the prompt as the mirror keeps them, first block first.
    chain: Sequence[int] = ()
    block_size_tokens: int = 16
    prompt_tokens: int = 1
    expected_output_tokens: int = 0
    priority: int = STANDARD
    excluded: frozenset[ReplicaKey] = frozenset()
    tenant_id: str = ""
    session_id: str = ""
    # Wanted time to first token, from arrival. Seconds; 0 = no goal.
    ttft_goal_s: float = 0.0

    def cached_tokens(self, hit_blocks: int) -> int:
        """Prompt tokens that need no prefill; the last one is always computed."""
        return min(hit_blocks * self.block_size_tokens, self.prompt_tokens - 1)


@dataclass(slots=True)
class Candidate:
    """One replica as seen for one query."""

    replica: Replica
    # Name of the filter that dropped it; empty = it passed all.
    filtered_by: str = ""
    hit_blocks: int = 0
    uncached_tokens: int = 0
    # Predicted seconds of prefill: queued before this request, and its own.
    backlog_s: float = 0.0
    own_s: float = 0.0
    # Predicted seconds that its output takes beside what runs there.
    decode_s: float = 0.0
    # Counted at the decision: queued prefill, queued and running tokens, requests.
    backlog_tokens: int = 0
    load_tokens: int = 0
    num_requests: int = 0
    # KV that requests hold, and how much there is; 0 = not told.
    kv_tokens: int = 0
    kv_capacity_tokens: int = 0
    # Another router may fill its opening: requests that would go there wait.
    is_withheld: bool = False
    # Requests that wait in this router before this one and want this replica; what they cost it,
    # and their own prefill.
    ahead: int = 0
    ahead_s: float = 0.0
    ahead_own_s: float = 0.0
    # For explanations.
    scores: dict[str, float] = field(default_factory=dict)
    total_score: float = 0.0

    @property
    def key(self) -> ReplicaKey:
        """The replica's identity."""
        return self.replica.key

    @property
    def predicted_ttft_s(self) -> float:
        """Backlog and own prefill."""
        return self.backlog_s + self.own_s

    def has_kv_room(self) -> bool:
        """Whether the prompt's KV fits beside that of the running requests.

        An empty replica always has room: what does not fit there is the worker's to refuse.
        """
        if not self.kv_capacity_tokens or not self.num_requests:
            return True
        return self.kv_tokens + self.uncached_tokens <= self.kv_capacity_tokens
