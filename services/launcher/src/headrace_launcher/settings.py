"""Settings of the command `headrace`, and the only place where it reads the environment."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, SecretStr, model_validator

from headrace_common.settings import OptionalAddress, ServiceSettings, config

_MAX_PORT = 65_535


class LauncherSettings(ServiceSettings):
    """Where a fleet keeps its things and what it is made of. Command-line options win."""

    prefix: ClassVar[str] = "HEADRACE_LAUNCHER_"
    model_config = config(prefix)

    state_dir: Path = Field(
        default_factory=lambda: _xdg("XDG_STATE_HOME", ".local/state") / "headrace",
        description="Ledger, outbox, logs. Default ${XDG_STATE_HOME:-~/.local/state}/headrace.",
    )
    cache_dir: Path = Field(
        default_factory=lambda: _xdg("XDG_CACHE_HOME", ".cache") / "headrace",
        description="Models. Default ${XDG_CACHE_HOME:-~/.cache}/headrace.",
    )
    host: str = Field(
        "127.0.0.1",
        pattern=r"^([^\s:\[\]]+|[0-9A-Fa-f:.]+)$",
        description="Address of the public API: a name, IPv4, or IPv6 (`::` = all).",
    )
    port: int = Field(8080, ge=1, le=_MAX_PORT, description="Port of the public API.")
    workers: int = Field(2, ge=1, le=64, description="Number of engine workers.")
    gateways: int = Field(
        1, ge=1, le=16, description="Number of gateways, on `port` and the ports after it."
    )
    prefill_workers: int = Field(
        0,
        ge=0,
        le=63,
        description="How many of the workers only compute prompts for the others; fewer than all.",
    )
    model: Path | None = Field(
        None,
        description="GGUF file, Hugging Face folder, or the name of a model that is fetched: "
        "smollm2-135m-instruct (the default) or gemma3-270m.",
    )
    model_name: str = Field(
        "smollm2-135m-instruct",
        pattern=r"^[A-Za-z0-9._/-]{1,128}$",
        description="Name under which the model is served; unset = by the model's file or folder.",
    )
    model_routes_file: Path | None = Field(
        None,
        description="TOML file of model routes; default model-routes.toml in the state directory.",
    )
    upstreams_file: Path | None = Field(
        None, description="TOML file of OpenAI-compatible servers that work in this fleet."
    )
    redis_url: str = Field(
        "", description="Redis to use, e.g. redis://host:6379/0; empty = start valkey-server."
    )
    kafka_bootstrap: str = Field(
        "", description="Kafka to use, host:port; empty = start the embedded broker."
    )
    kafka_max_bytes: int = Field(
        256 * 2**20,
        ge=32 * 2**20,
        le=2**40,
        description="Most memory of the embedded broker, which keeps all it ever got: with more it "
        "starts anew, and what is not booked is sent again. Bytes.",
    )
    database_url: SecretStr = Field(
        SecretStr(""),
        description="SQLAlchemy URL of the ledger; empty = SQLite in the state directory.",
    )
    billing_address: OptionalAddress = Field(
        "",
        description="host:port of billing for keys, usage, ledger; empty = the running fleet's.",
    )
    guard_address: OptionalAddress = Field(
        "",
        description="host:port of the guard for its commands; empty = the running fleet's.",
    )
    drain_grace_s: float = Field(
        20.0, ge=0, le=3600, description="Time for running streams to finish at the end. Seconds."
    )
    owner_pid: int = Field(
        0, ge=0, description="A fleet ends when this process is gone, e.g. a test run; 0 = none."
    )
    max_crashes: int = Field(
        5,
        ge=1,
        le=1000,
        description="A child that crashes this often in the window ends the fleet.",
    )
    crash_window_s: float = Field(60.0, gt=0, le=86_400, description="The window. Seconds.")

    @model_validator(mode="after")
    def _check_ports(self) -> Self:
        if self.port + self.gateways - 1 > _MAX_PORT:
            raise ValueError(f"{self.gateways} gateways from port {self.port} on: ports end there")
        return self

    @model_validator(mode="before")
    @classmethod
    def _name_by_model(cls, values: Any) -> Any:  # Any: what the environment and options gave
        # A model served under another one's name would mislead everyone who asks for it.
        if isinstance(values, dict) and values.get("model") and not values.get("model_name"):
            model = Path(values["model"])
            name = model.stem if model.suffix == ".gguf" else model.name
            clean = re.sub(r"[^a-z0-9._-]+", "-", name.lower())[:128]
            return {**values, "model_name": clean or "model"}
        return values


def child_environment() -> dict[str, str]:
    """Return a copy of the environment for a child, without the launcher's own settings."""
    return {k: v for k, v in os.environ.items() if not k.startswith(LauncherSettings.prefix)}


def _xdg(variable: str, fallback: str) -> Path:
    value = os.environ.get(variable, "")
    return Path(value) if Path(value).is_absolute() else Path.home() / fallback
