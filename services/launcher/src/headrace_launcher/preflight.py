"""Everything that can be known to go wrong before the first process is started, in plain words."""

from __future__ import annotations

import errno
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from headrace_common.settings import join_address
from headrace_launcher.ports import bind_error, holder_of
from headrace_launcher.state_dir import StateDir

_MIN_STATE_BYTES = 200 * 2**20
_CONNECT_TIMEOUT_S = 3.0
_DEFAULT_REDIS_PORT = 6379


class PreflightError(Exception):
    """The fleet cannot start; the message says why and what to do."""


@dataclass(frozen=True)
class Endpoint:
    """Where the public API shall listen."""

    host: str
    port: int


def check_state_dir(state_dir: StateDir) -> None:
    """Make the folder and see that it can be written to and has room.

    Raises:
        PreflightError: it cannot.
    """
    try:
        state_dir.create()
    except OSError as error:
        raise PreflightError(explain_os_error(error, state_dir.path)) from error
    check_room(state_dir.path, _MIN_STATE_BYTES, "the fleet's state")


def check_room(folder: Path, needed_bytes: int, purpose: str) -> None:
    """See that the file system of an existing folder has room.

    Raises:
        PreflightError: it has not.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise PreflightError(
            f"too little room for {purpose}: {folder} has {free_bytes // 2**20} MiB free, "
            f"{needed_bytes // 2**20} MiB are needed. Free some, or choose another folder"
        )


def check_file(path: Path | None, option: str) -> None:
    """See that a file which an option names is there.

    Raises:
        PreflightError: it is not.
    """
    if path is not None and not path.is_file():
        raise PreflightError(f"{option}: there is no file {path}")


def check_model_routes(path: Path | None) -> None:
    """Let the gateway read a file of model routes: with a wrong one it would start without any.

    Raises:
        PreflightError: the file is not there, or wrong.
    """
    check_file(path, "--models")
    if path is None:
        return
    argv = [sys.executable, "-m", "headrace_gateway", "--check-config", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PreflightError(f"--models: {done.stderr.strip().removeprefix('headrace-gateway: ')}")


def check_port(endpoint: Endpoint) -> None:
    """See that the public port is free.

    Raises:
        PreflightError: it is not.
    """
    error = bind_error(endpoint.host, endpoint.port)
    if error is None:
        return
    where = join_address(endpoint.host, endpoint.port)
    if error.errno == errno.EADDRINUSE:
        holder = holder_of(endpoint.port)
        by = f" by {holder}" if holder else ""
        raise PreflightError(
            f"port {endpoint.port} on {endpoint.host} is in use{by}. Stop that, or choose another "
            f'port: `headrace up --port N` (with make: `make up ARGS="--port N"`)'
        )
    if error.errno == errno.EACCES:
        raise PreflightError(
            f"not allowed to listen on {where}: ports below 1024 need root; choose another --port"
        )
    raise PreflightError(f"cannot listen on {where}: {error.strerror or error}")


def check_reachable(url: str, what: str, setting: str) -> None:
    """See that somebody listens at a URL, or at one of ``host:port,...``.

    Raises:
        PreflightError: nobody does.
    """
    if url.startswith("unix://"):
        places = [urlsplit(url).path]
    else:
        places = [_host_and_port(one) for one in ([url] if "://" in url else url.split(","))]
    reasons = []
    for place in places:
        try:
            _connect(place)
        except (OSError, ValueError) as error:
            reasons.append(f"{place} ({error})")
        else:
            return
    raise PreflightError(f"no {what} answers at {', '.join(reasons)}; see {setting}")


def _host_and_port(url: str) -> str:
    """Leave out what stands before and behind: a user, a password, a database."""
    return urlsplit(url if "://" in url else f"//{url.strip()}").netloc.rpartition("@")[2]


def _connect(place: str) -> None:
    if place.startswith("/"):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(_CONNECT_TIMEOUT_S)
            client.connect(place)
        return
    parts = urlsplit(f"//{place}")
    address = (parts.hostname or "", parts.port or _DEFAULT_REDIS_PORT)
    socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S).close()


def explain_os_error(error: OSError, path: Path) -> str:
    """Say what an `OSError` about a path means for an operator."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return f"the disk that holds {path} is full. Free some room, or choose another folder"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return f"{path} cannot be written to ({error.strerror}). Choose another --state-dir"
        case errno.ENOTDIR | errno.EEXIST:
            return f"{path} is not a folder, or lies inside something that is not"
        case _:
            return f"{path}: {error.strerror or error}"
