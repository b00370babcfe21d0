"""What a model is sampled with where a request names nothing: whose word counts, value by value.

1. the operator's setting, `HEADRACE_WORKER_SAMPLING_DEFAULTS`;
2. `generation_config.json` in the model's folder;
3. a GGUF file's `general.sampling.*`, as llama.cpp defines them (`gguf-py`, `Keys.General`);
4. a table of files whose makers say it only in their model card.

What nobody says stays OpenAI's: temperature and top_p 1, the rest off. The gateway applies it.

As with vLLM's `--generation-config auto`, `do_sample` is not read: Transformers takes its absence
for greedy decoding, and folders that are meant for sampling often lack it. Of llama.cpp's keys
those are left out that this engine has no sampler for; `penalty_repeat` counts the whole prompt and
output here, `penalty_last_n` tokens there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace_common.errors import InvalidRequest
from headrace_contracts.worker.v1.worker_pb2 import SamplingValues

_log = logging.getLogger(__name__)

GENERATION_CONFIG = "generation_config.json"
# Words for the setting: what the model says, or nothing.
MODEL, OPENAI = "model", "openai"
_GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


class SamplingDefaults(BaseModel):
    """Values with their bounds; None = nothing said."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**32)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)

    @property
    def said(self) -> dict[str, Any]:
        """The values that are there, by name."""
        return self.model_dump(exclude_none=True)

    def over(self, other: SamplingDefaults) -> SamplingDefaults:
        """Return these values, and the other's where these say nothing."""
        return SamplingDefaults(**{**other.said, **self.said})

    def to_card(self) -> SamplingValues | None:
        """Return what a model card says; None = nothing."""
        values = self.said
        if self.top_k is not None:
            # Both 0 and -1 are in use for "off".
            values["top_k"] = max(0, self.top_k)
        return SamplingValues(**values) if values else None

    @classmethod
    def of_folder(cls, folder: Path) -> Self:
        """Read a model folder's generation_config.json; one that is not there says nothing.

        Raises:
            InvalidRequest: it holds no JSON object.
        """
        path = folder / GENERATION_CONFIG
        if not path.exists():
            return cls()
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise InvalidRequest(f"{path} holds no JSON object")
        return cls._understood({name: values.get(name) for name in cls.model_fields}, path.name)

    @classmethod
    def of_gguf(cls, metadata: Mapping[str, Any]) -> Self:
        """Read a GGUF file's metadata."""
        found = {name: metadata.get(key) for key, name in _GGUF_KEYS.items()}
        # 32-bit values: 0.95 is meant where 0.949999988 is stored.
        told = {
            name: float(f"{value:.6g}") if isinstance(value, float) else value
            for name, value in found.items()
        }
        return cls._understood(told, "GGUF metadata")

    @classmethod
    def of_setting(cls, text: str) -> Self:
        """Read the operator's JSON object.

        Raises:
            ValueError: it is none, or a value is wrong; the message says which.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ValueError(
                f'neither "{MODEL}" nor "{OPENAI}" nor right JSON: {_explain(error)}'
            ) from error

    @classmethod
    def _understood(cls, values: dict[str, Any], where: str) -> Self:
        """Take the values that are in their bounds. A model with a wrong one can still serve."""
        taken = {name: value for name, value in values.items() if value is not None}
        try:
            return cls(**taken)
        except ValidationError as error:
            _log.warning("sampling defaults in %s passed over: %s", where, _explain(error))
            wrong = {item["loc"][0] for item in error.errors()}
            return cls(**{name: value for name, value in taken.items() if name not in wrong})


def resolve(setting: str, model: SamplingDefaults) -> SamplingDefaults:
    """Return what holds, from the setting and what the model says."""
    if setting == MODEL:
        return model
    if setting == OPENAI:
        return SamplingDefaults()
    return SamplingDefaults.of_setting(setting).over(model)


def check_setting(text: str) -> str:
    """Return the setting if it is one.

    Raises:
        ValueError: it is not.
    """
    resolve(text, SamplingDefaults())
    return text


def recommended(source_sha256: str) -> SamplingDefaults:
    """Return what the makers of a file recommend outside of it."""
    return _BY_FILE.get(source_sha256, SamplingDefaults())


_BY_FILE = {
    # SmolLM2-135M-Instruct Q4_1, the launcher's default model.
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53": SamplingDefaults(
        temperature=0.2, top_p=0.9
    ),
}


def _explain(error: ValidationError) -> str:
    return "; ".join(
        ": ".join([*(str(part) for part in item["loc"]), item["msg"]]) for item in error.errors()
    )
