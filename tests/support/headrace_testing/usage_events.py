"""Usage events as gateways and workers write them."""

from __future__ import annotations

from headrace_contracts.types.v1.types_pb2 import ReplicaRef, TokenUsage
from headrace_contracts.usage.v1.usage_pb2 import (
    ENDING_COMPLETED,
    Ending,
    UsageEvent,
    WorkerUsage,
)

MODEL = "smollm2-135m-instruct"
ADMITTED_UNIX_US = 1_800_000_000_000_000
# 60 uncached x 20 + 40 cached x 2 + 30 output x 60, at the packaged prices.
USAGE = TokenUsage(prompt_tokens=100, cached_gpu_tokens=40, output_tokens=30)
AMOUNT_NANO_USD = 3080


def opened(
    request_id: str = "req_1",
    tenant_id: str = "acme",
    key_id: str = "key_1",
    *,
    at_unix_us: int = ADMITTED_UNIX_US,
    life_s: float = 60,
) -> UsageEvent:
    """A request that was admitted and must be over after *life_s*."""
    return UsageEvent(
        kind=UsageEvent.KIND_OPENED,
        request_id=request_id,
        tenant_id=tenant_id,
        project_id="default",
        key_id=key_id,
        model=MODEL,
        price_version=1,
        occurred_unix_us=at_unix_us,
        hold_nano_usd=10_000,
        deadline_unix_us=at_unix_us + round(life_s * 1e6),
    )


def closed(
    request_id: str = "req_1",
    tenant_id: str = "acme",
    key_id: str = "key_1",
    *,
    usage: TokenUsage = USAGE,
    amount_nano_usd: int = AMOUNT_NANO_USD,
    ending: Ending.ValueType = ENDING_COMPLETED,
    at_unix_us: int = ADMITTED_UNIX_US + 2_000_000,
) -> UsageEvent:
    """A request that took two seconds."""
    return UsageEvent(
        kind=UsageEvent.KIND_CLOSED,
        request_id=request_id,
        tenant_id=tenant_id,
        project_id="default",
        key_id=key_id,
        model=MODEL,
        price_version=1,
        occurred_unix_us=at_unix_us,
        usage=usage,
        ending=ending,
        amount_nano_usd=amount_nano_usd,
        duration_s=2.0,
    )


def witnessed(
    request_id: str = "req_1", *, usage: TokenUsage = USAGE, worker_id: str = "w1"
) -> WorkerUsage:
    """What a worker counted."""
    return WorkerUsage(
        request_id=request_id,
        replica=ReplicaRef(worker_id=worker_id, incarnation=1),
        usage=usage,
        occurred_unix_us=ADMITTED_UNIX_US + 1_900_000,
    )
