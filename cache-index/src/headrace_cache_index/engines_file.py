"""The file that names engines of another make whose KV events are read.

::

    version = 1

    [[engine]]
    worker = "10.0.0.7:7100"        # gRPC address of the worker in front of the engine
    events = "tcp://10.0.0.7:5557"  # its PUB socket
    replay = "tcp://10.0.0.7:5558"  # its replay socket; without one a gap costs all that was known
    topic = ""                      # what it publishes under
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from headrace_common.toml_file import load_toml

_ENDPOINT = r"^(tcp|ipc)://.+"


class EngineEntry(BaseModel):
    """One engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    worker: str = Field(pattern=r"^.+:\d{1,5}$")
    events: str = Field(pattern=_ENDPOINT)
    replay: str | None = Field(default=None, pattern=_ENDPOINT)
    topic: str = ""


class EnginesFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1]
    engine: tuple[EngineEntry, ...] = ()


def load_engines_file(path: Path | None) -> tuple[EngineEntry, ...]:
    """Read the file; None = no engines.

    Raises:
        SettingsError: it cannot be read or says something wrong; the message lists every mistake.
    """
    return () if path is None else load_toml(path, EnginesFile, "engines file").engine
