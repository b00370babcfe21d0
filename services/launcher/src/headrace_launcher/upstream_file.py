"""The file of upstreams: engines of another make that work in this fleet, one adapter each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from headrace_common.toml_file import load_toml


class Upstream(BaseModel):
    """One server."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(pattern=r"^https?://[^\s@]+$")
    model: str = Field(min_length=1, max_length=200)
    served_as: str = Field(default="", max_length=200)
    api_key_file: Path | None = None
    context_tokens: int = Field(default=0, ge=0)
    max_requests: int = Field(default=256, ge=1)
    continuous_usage: bool = False
    cache_salt: bool = False

    def environment(self) -> dict[str, str]:
        """Return the settings of its adapter, without their prefix."""
        given = {
            "URL": self.url,
            "MODEL": self.model,
            "MODEL_NAME": self.served_as,
            "API_KEY_FILE": "" if self.api_key_file is None else str(self.api_key_file),
            "CONTEXT_TOKENS": str(self.context_tokens),
            "MAX_REQUESTS": str(self.max_requests),
            "CONTINUOUS_USAGE": str(self.continuous_usage).lower(),
            "CACHE_SALT": str(self.cache_salt).lower(),
        }
        return {name: value for name, value in given.items() if value}


def _unlike_our_own(name: str) -> str:
    if _OWN.fullmatch(name):
        raise ValueError(f"{name} is the name of a part of the fleet itself; choose another")
    return name


_OWN = re.compile(
    r"model|supervisor|(gateway|worker)(-\d+)?"
    r"|billing|cache-index|guard|kafka|ratelimit|router|valkey"
)
_Name = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,40}$"), AfterValidator(_unlike_our_own)]


class UpstreamFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1]
    # By the name of the worker.
    upstreams: dict[_Name, Upstream]


def load_upstreams(path: Path | None) -> dict[str, Upstream]:
    """Read a file; None has none.

    Raises:
        SettingsError: it cannot be read or says something wrong.
    """
    return {} if path is None else load_toml(path, UpstreamFile, "upstreams").upstreams
