"""Free ports for the inside of a fleet, and who holds one that is not free."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

import psutil

from headrace_common.settings import address_family, split_address

# Below the range for outgoing connections: a port stays free while its service restarts.
_FIRST_PORT, _LAST_PORT = 20_000, 32_000
_MAX_TRIES = 2000


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return *count* different ports that nobody listens on now.

    Raises:
        OSError: no such ports were found.
    """
    with ExitStack() as stack:  # all stay bound until all are found
        found: list[int] = []
        for _ in range(_MAX_TRIES):
            if len(found) == count:
                return found
            port = random.randint(_FIRST_PORT, _LAST_PORT)  # noqa: S311 - not a secret
            server = stack.enter_context(socket.socket())
            try:
                server.bind((host, port))
            except OSError:
                continue
            found.append(port)
    raise OSError(f"no {count} free ports between {_FIRST_PORT} and {_LAST_PORT} on {host}")


def bound_socket(address: str) -> socket.socket:
    """Return a socket bound to ``host:port`` that does not listen yet; the caller closes it.

    Raises:
        OSError: it cannot be bound; names the address.
    """
    try:
        return _bound(*split_address(address))
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {address}: {error.strerror}") from error


def bind_error(host: str, port: int) -> OSError | None:
    """Try to bind; return what stands against it, or None."""
    try:
        with _bound(host, port) as server:
            server.listen(1)
    except OSError as error:
        return error
    return None


def _bound(host: str, port: int) -> socket.socket:
    server = socket.socket(address_family(host))
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
    except OSError:
        server.close()
        raise
    return server


def holder_of(port: int) -> str:
    """Name the process that listens on *port*, as far as we may know; empty if not."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,):
                return _describe(connection.pid)
    except (psutil.Error, OSError):
        pass
    return ""


def _describe(pid: int | None) -> str:
    if pid is None:
        return ""
    try:
        command = " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        command = ""
    return f"process {pid} ({command[:80]})" if command else f"process {pid}"
