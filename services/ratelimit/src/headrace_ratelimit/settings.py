"""The rate limiter's settings."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from headrace_common.settings import OptionalAddress, RpcServiceSettings, config


class RateLimitSettings(RpcServiceSettings):
    """Environment variables with the prefix ``HEADRACE_RATELIMIT_``."""

    prefix: ClassVar[str] = "HEADRACE_RATELIMIT_"
    model_config = config(prefix)

    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        pattern="^(redis|rediss|unix)://",
        description="Where limits, leases and holds are kept. Should write an append-only file.",
    )
    redis_timeout_s: float = Field(
        0.04,
        gt=0,
        le=5,
        description="Longest wait for Redis before the local share decides. Seconds.",
    )
    billing_address: OptionalAddress = Field(
        "",
        description="host:port of billing, whose ledger brings budgets back when Redis has lost "
        "them; empty = what is lost is forgotten.",
    )
    num_replicas: int = Field(
        1,
        ge=1,
        le=1000,
        description="Rate limiters that share the load: without Redis each grants its share.",
    )
    overdraft_ratio: float = Field(
        0.05,
        ge=0,
        le=1,
        description="Share of a budget that postpaid keys may spend during an outage of Redis.",
    )
