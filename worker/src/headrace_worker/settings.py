"""Every knob of a worker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from headrace_common.settings import RpcServiceSettings, config


def default_cache_dir() -> Path:
    """Where prepared models are kept if nobody says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "headrace" / "prepared"


class WorkerSettings(RpcServiceSettings):
    """Environment of a worker, prefix `HEADRACE_WORKER_`."""

    prefix: ClassVar[str] = "HEADRACE_WORKER_"
    model_config = config(prefix)

    worker_id: str = Field(
        "worker-1",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Name of this worker; unique in the fleet, the same after a restart.",
    )
    model_path: Path = Field(
        description="GGUF file, prepared folder or Hugging Face folder (safetensors)."
    )
    model_name: str = Field(
        "smollm2-135m-instruct", min_length=1, max_length=200, description="Served model name."
    )
    cache_dir: Path = Field(
        default_factory=default_cache_dir,
        description="Folder for models prepared from GGUF files; made once, shared by workers.",
    )
    cache_index_address: str = Field(
        "",
        pattern=r"^([^\s:]+:\d{1,5})?$",
        description="host:port of the cache-index that gets KV events; empty = none.",
    )
    kafka_bootstrap: str = Field(
        "", description="host:port of Kafka for the worker's own usage records; empty = none."
    )
    kv_capacity_tokens: int = Field(
        0,
        ge=0,
        le=1 << 31,
        description="Tokens that the KV pool holds; 0 = as many as fit in a quarter of the free "
        "memory, at most 1 GiB.",
    )
    num_threads: int = Field(1, ge=1, le=256, description="Compute threads.")
    token_budget_tokens: int = Field(
        256,
        ge=1,
        le=65536,
        description="Most tokens in one engine step; smaller = smoother streams, larger = faster "
        "prompts.",
    )
    max_running: int = Field(
        32, ge=1, le=4096, description="Most sequences in one step; at most the token budget."
    )
    max_waiting: int = Field(
        64, ge=1, le=65536, description="Requests that may wait; beyond that they are refused."
    )
    stuck_after_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="Time without a completed step, while work is pending, after which the worker "
        "says STUCK. Seconds.",
    )
