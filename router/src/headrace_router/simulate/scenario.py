"""What is simulated: the fleet, the network between its parts, and what goes wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from headrace_router.policy_file import PolicyFile, PolicyName
from headrace_router.simulate.cost_model import CostModel
from headrace_router.simulate.trace import TRACE_BLOCK_TOKENS

# What is compared unless somebody names others.
COMPARED_POLICIES: Final[tuple[PolicyName, ...]] = (
    "hold",
    "min-ttft",
    "overlap-load",
    "weighted",
    "prefix-threshold",
    "least-load",
    "round-robin",
    "random",
)
# Nothing is refused in a simulation: a request that waits for long has missed its goal anyway.
_NO_BOUNDS = {"max_waiting_per_model": 1_000_000, "max_wait_s": 3600.0, "max_batch_ttft_s": 0.0}


@dataclass(frozen=True, slots=True)
class Scenario:
    """One set-up; every policy runs in the same."""

    num_workers: int = 8
    # KV of each worker.
    kv_tokens: int = 410_000
    costs: CostModel = field(default_factory=CostModel)
    block_tokens: int = TRACE_BLOCK_TOKENS
    # Most tokens per step of a worker.
    chunk_tokens: int = 2048
    num_routers: int = 1
    # Whether routers tell one another of their decisions.
    share_bookings: bool = True
    # Share of the index's changes that never arrive.
    event_loss_ratio: float = 0.0
    # One way: between services, from a worker's cache to the routers' mirrors, between routers.
    network_delay_s: float = 0.001
    event_delay_s: float = 0.005
    booking_delay_s: float = 0.002
    # From a gap in the changes to the replica's blocks read anew.
    resync_delay_s: float = 0.1
    # Goal for the first token: base + ratio x prefill of the whole prompt on an idle worker.
    goal_base_s: float = 1.0
    goal_ratio: float = 2.0
    # Whether requests carry that goal to the router.
    tell_goals: bool = False
    # The first part of the requests fills the caches and is not scored.
    warm_up_ratio: float = 0.1
    seed: int = 1
    # Policy parameters; bounds of the queue are lifted.
    policy_file: PolicyFile = field(default_factory=lambda: PolicyFile(version=1))

    def goal_s(self, prompt_tokens: int) -> float:
        """Return the goal for a prompt's first token."""
        cold_s = self.costs.cold_prefill_s(prompt_tokens, self.chunk_tokens)
        return self.goal_base_s + self.goal_ratio * cold_s

    def policies(self, name: str) -> PolicyFile:
        """Return the policy file with one policy for all."""
        told = self.policy_file.model_dump()
        told["pick"] = told["pick"] | {"policy": name, "shadow": None}
        told["queue"] |= _NO_BOUNDS
        told["models"] = {}
        return PolicyFile.model_validate(told)
