"""Versioned policy in TOML: read, checked against a model, refused with every mistake named."""

from __future__ import annotations

import tomllib
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from headrace_common.settings import SettingsError

Model = TypeVar("Model", bound=BaseModel)


def load_toml(path: Path | Traversable, model: type[Model], name: str) -> Model:
    """Read a file and check it.

    Args:
        path: where it is; may lie in a package.
        model: what it must say.
        name: what it is called in messages, e.g. ``policy file``.

    Raises:
        SettingsError: it cannot be read or says something wrong; the message lists every mistake.
    """
    try:
        return model.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{name} {path}: {error}") from error
    except ValidationError as error:
        mistakes = "; ".join(
            ".".join(str(part) for part in item["loc"])
            + (": " if item["loc"] else "")
            # What our own checks raise.
            + item["msg"].removeprefix("Value error, ")
            for item in error.errors()
        )
        raise SettingsError(f"{name} {path}: {mistakes}") from error
