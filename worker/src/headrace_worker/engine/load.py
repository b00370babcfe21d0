"""What the engine is doing, as a value that any thread may read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineLoad:
    """The engine's load after a step; field meanings as in the contract's LoadReport."""

    num_waiting: int = 0
    num_running: int = 0
    queued_prefill_tokens: int = 0
    running_tokens: int = 0
    kv_used_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0
    decode_step_streams: float = 0.0
    prefix_hit_tokens_total: int = 0
    prefix_query_tokens_total: int = 0
    num_preemptions_total: int = 0


@dataclass(frozen=True)
class StepFacts:
    """What one step did, for metrics."""

    duration_s: float
    prefill_tokens: int
    decode_tokens: int
    num_preempted: int
    failed: bool
