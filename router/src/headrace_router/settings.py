"""Settings of the router."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from headrace_common.kv_index import Tier
from headrace_common.settings import RpcServiceSettings, config, split_address
from headrace_contracts.types.v1.types_pb2 import CACHE_TIER_CPU, CACHE_TIER_DISK, CACHE_TIER_GPU

DNS_PREFIX = "dns:"


class RouterSettings(RpcServiceSettings):
    """Where Redis and the workers are, and the policy file."""

    prefix: ClassVar[str] = "HEADRACE_ROUTER_"
    model_config = config(prefix)

    redis_url: str = Field(
        "redis://127.0.0.1:6379/0", pattern=r"^(redis|rediss|unix)://", description="Redis 7+ URL."
    )
    workers: str = Field(
        "",
        description="Workers' gRPC addresses, comma-separated: host:port, or dns:host:port for "
        "every address that the name resolves to.",
    )
    policy_file: Path | None = Field(
        None, description="TOML file with the picking policy; unset = the packaged one."
    )
    resolve_interval_s: float = Field(
        5.0, ge=0.1, le=3600, description="Time between two look-ups of dns: workers. Seconds."
    )
    index_audit_interval_s: float = Field(
        5.0, ge=0.1, le=3600, description="Time between two comparisons with Redis. Seconds."
    )
    index_max_bytes: int = Field(
        2 << 30,
        ge=1 << 20,
        le=1 << 40,
        description="Most memory for the mirror of the prefix index; beyond it the blocks least "
        "recently used are forgotten. Bytes.",
    )
    assumed_ttl_s: float = Field(
        120.0,
        ge=0,
        le=86_400,
        description="How long blocks sent to an engine without KV events are assumed to be cached "
        "there, at most; 0 = not at all. Seconds.",
    )
    host_block_weight: float = Field(
        0.75,
        ge=0,
        le=1,
        description="Worth of a block cached in host memory; 1 = as on the device.",
    )
    disk_block_weight: float = Field(
        0.25, ge=0, le=1, description="Worth of a block cached on disk; 1 = as on the device."
    )
    max_recent_decisions: int = Field(
        5000, ge=1, le=1_000_000, description="Decisions kept for GetDecision, some 3 kB each."
    )
    random_seed: int | None = Field(
        None, ge=0, description="Seed of the tie-breaks, for repeatable tests; unset = drawn."
    )

    @field_validator("workers")
    @classmethod
    def _check_workers(cls, text: str) -> str:
        for entry in _entries(text):
            split_address(entry.removeprefix(DNS_PREFIX))
        return text

    def tier_weights(self) -> dict[Tier, float]:
        """Return the worth of a cached block by tier."""
        return {
            CACHE_TIER_GPU: 1.0,
            CACHE_TIER_CPU: self.host_block_weight,
            CACHE_TIER_DISK: self.disk_block_weight,
        }

    def worker_entries(self) -> list[str]:
        """Return the entries of `workers`."""
        return _entries(self.workers)


def _entries(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",") if entry.strip()]
