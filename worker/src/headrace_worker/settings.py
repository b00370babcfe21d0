"""Every knob of a worker."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, SecretStr

from headrace_common.settings import (
    OptionalAddress,
    RpcServiceSettings,
    SettingsError,
    TopicReplicas,
    config,
)
from headrace_worker.sampling_defaults import MODEL, check_setting


def default_cache_dir() -> Path:
    """Where prepared models are kept if nobody says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "headrace" / "prepared"


def own_host_name() -> str:
    """Name this host as far as a worker's name goes."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64] or "worker"


def num_own_cores() -> int:
    """Count the cores that this process may use, where the system tells; else all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _FleetMemberSettings(RpcServiceSettings):
    """What workers of both kinds have."""

    worker_id: str = Field(
        default_factory=own_host_name,
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Name of this worker; unique in the fleet, the same after a restart. Default: "
        "the host's name, which in a container is the container's or the pod's.",
    )
    kafka_bootstrap: str = Field(
        "", description="host:port of Kafka for the worker's own usage records; empty = none."
    )
    kafka_topic_replicas: TopicReplicas = 0


class WorkerSettings(_FleetMemberSettings):
    """Environment of a worker, prefix `HEADRACE_WORKER_`."""

    prefix: ClassVar[str] = "HEADRACE_WORKER_"
    model_config = config(prefix)

    model_path: Path = Field(
        description="GGUF file, prepared folder or Hugging Face folder (safetensors)."
    )
    model_name: str = Field(
        "smollm2-135m-instruct", min_length=1, max_length=200, description="Served model name."
    )
    sampling_defaults: Annotated[str, AfterValidator(check_setting)] = Field(
        MODEL,
        description="What requests that name none are sampled with: model = what the model's "
        "generation_config.json, its GGUF file or its makers say; openai = temperature and top_p "
        '1; or a JSON object over what the model says, such as {"temperature": 0.6, "top_k": 20}, '
        "of temperature, top_p, top_k, min_p, repetition_penalty.",
    )
    cache_dir: Path = Field(
        default_factory=default_cache_dir,
        description="Folder for models prepared from GGUF files; made once, shared by workers.",
    )
    cache_index_address: OptionalAddress = Field(
        "",
        description="host:port of the cache-index that gets KV events; empty = none.",
    )
    kv_capacity_tokens: int = Field(
        0,
        ge=0,
        le=1 << 31,
        description="Tokens that the KV pool holds; 0 = as many as fit in a quarter of the free "
        "memory of the machine or the container, at most 1 GiB; on a GPU, in 85 % of what the "
        "weights leave free.",
    )
    num_threads: int = Field(
        1,
        ge=0,
        le=256,
        description="Most compute threads; 0 = one for each core that it may use. While other "
        "workers with the same cache folder compute on the same cores, each takes its share of "
        "these only.",
    )
    device: Literal["cpu", "cuda"] = Field(
        "cpu",
        description="What computes: cpu, or cuda for one GPU with bfloat16 weights and KV and the "
        "Triton kernels. Without a CUDA device the worker does not start then.",
    )
    activations: Literal["float32", "int16", "int8"] = Field(
        "int16",
        description="What activations are rounded to before quantised matrices: float32 is exact, "
        "int16 next to exact, int8 fastest; docs/cpu-backend.md has the cost in accuracy.",
    )
    token_budget_tokens: int = Field(
        256,
        ge=1,
        le=65536,
        description="Most tokens in one engine step; smaller = smoother streams, larger = faster "
        "prompts.",
    )
    stream_slowdown_ratio: float = Field(
        2.2,
        ge=1,
        le=100,
        description="Longest step while streams run, as a multiple of a step without prompts: "
        "chunks of prompts are made as small as that needs. Streams with a wanted time per token "
        "go by that instead, and those of the class batch do not count. 100 = as good as off.",
    )
    profile_file: Path | None = Field(
        None,
        description="Write a timeline of the first steps here, for chrome://tracing or "
        "ui.perfetto.dev; not set = none.",
    )
    profile_steps: int = Field(
        500, ge=1, le=10_000, description="Steps in that timeline, from the first request on."
    )
    check_invariants: bool = Field(
        False,
        description="Debug mode: check all books of the engine after every step; slow. A mistake "
        "ends all requests, is logged, and the engine starts afresh.",
    )
    role: Literal["both", "prefill", "decode"] = Field(
        "both",
        description="What routers send here: requests (both, decode), or prompts to be computed "
        "for a decode worker (prefill).",
    )
    kv_transfer_timeout_s: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="Longest wait for a prompt's KV from a prefill worker, the prefill included; "
        "after it the prompt is computed here. Seconds.",
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

    def compute_threads(self) -> int:
        """Return how many threads compute at most."""
        return self.num_threads or num_own_cores()


class UpstreamSettings(_FleetMemberSettings):
    """Environment of an upstream adapter, prefix `HEADRACE_UPSTREAM_`."""

    prefix: ClassVar[str] = "HEADRACE_UPSTREAM_"
    model_config = config(prefix)

    url: str = Field(
        pattern=r"^https?://[^\s@]+$",
        description="Base URL of the server's API, such as http://127.0.0.1:8000/v1.",
    )
    model: str = Field(min_length=1, max_length=200, description="The model's name over there.")
    model_name: str = Field(
        "", max_length=200, description="Name under which it is served here; empty = the same."
    )
    api_key: SecretStr = Field(
        SecretStr(""), description="Key for the server; never logged. Empty = none."
    )
    api_key_file: Path | None = Field(
        None, description="File that holds the key, read at start; wins over the key itself."
    )
    context_tokens: int = Field(
        0,
        ge=0,
        le=1 << 31,
        description="Prompt and output together, for servers that do not tell; 0 = as they tell, "
        "else 32,768. Tokens.",
    )
    max_requests: int = Field(
        256, ge=1, le=65536, description="Most requests under way; beyond that they are refused."
    )
    connect_timeout_s: float = Field(
        5.0, gt=0, le=600, description="Longest wait for a connection. Seconds."
    )
    silence_timeout_s: float = Field(
        120.0, gt=0, le=3600, description="A stream silent for so long is given up. Seconds."
    )
    continuous_usage: bool = Field(
        False,
        description="Ask for counts with each event, as vLLM, SGLang and Headrace give them: exact "
        "bills for clients that leave in mid-answer. Other servers may refuse it.",
    )
    cache_salt: bool = Field(
        False,
        description="Send each tenant's salt as `cache_salt`, as vLLM, SGLang and TensorRT-LLM "
        "know it: no tenant shares a prefix hit with another there. Other servers may refuse it.",
    )
    probe_interval_s: float = Field(
        2.0, gt=0, le=600, description="Time between two looks at the server's health. Seconds."
    )

    @property
    def served_name(self) -> str:
        """The model's name in this fleet."""
        return self.model_name or self.model

    def key(self) -> str:
        """Return the server's key; empty = none.

        Raises:
            SettingsError: its file cannot be read.
        """
        if self.api_key_file is None:
            return self.api_key.get_secret_value()
        try:
            return self.api_key_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(
                f"the file of the upstream's key cannot be read: {error}"
            ) from error
