"""Settings of the cache index."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from headrace_common.settings import RpcServiceSettings, config


class CacheIndexSettings(RpcServiceSettings):
    """Where Redis is, and how long and how much is kept."""

    prefix: ClassVar[str] = "HEADRACE_CACHE_INDEX_"
    model_config = config(prefix)

    redis_url: str = Field(
        "redis://127.0.0.1:6379/0", pattern=r"^(redis|rediss|unix)://", description="Redis 7+ URL."
    )
    lease_s: float = Field(
        15.0,
        ge=0.2,
        le=3600,
        description="A replica is dropped when its publisher is gone for this long. Seconds.",
    )
    blocks_ttl_s: float = Field(
        300.0,
        ge=1,
        le=86_400,
        description="Life of a replica's blocks in Redis without any renewal. Seconds.",
    )
    max_stream_entries: int = Field(
        100_000,
        ge=1000,
        le=10_000_000,
        description="About how many changes Redis keeps for routers that fall behind.",
    )
    max_blocks_per_replica: int = Field(
        4_000_000,
        ge=16,
        le=100_000_000,
        description="Most blocks of one replica, over all tiers, whatever it says of itself.",
    )
    max_index_bytes: int = Field(
        4 << 30,
        ge=1 << 20,
        le=1 << 44,
        description="Most memory of Redis for the blocks of all replicas; each may hold an equal "
        "share. Bytes.",
    )
    engines_file: Path | None = Field(
        None,
        description="TOML file naming engines of another make whose KV events (ZMQ) are read.",
    )
