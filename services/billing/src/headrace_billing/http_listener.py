"""A small HTTP server inside the service: started and stopped by its lifecycle, not by signals."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from headrace_common.settings import split_address

_BACKLOG = 128


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to the service."""
        yield


class HttpListener:
    """Serves an app.

    Args:
        app: what is served.
        address: host:port; port 0 takes any free one, see `port`.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(self, app: FastAPI, address: str) -> None:
        host, port = split_address(address)
        self._socket = socket.create_server((host, port), backlog=_BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app, lifespan="off", log_config=None, access_log=False, server_header=False
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Take connections."""
        serving = self._server.serve(sockets=[self._socket])
        self._task = asyncio.create_task(serving, name="admin-http")

    async def stop(self, grace_s: float) -> None:
        """Finish what runs, as far as the grace goes, and close."""
        # uvicorn counts whole seconds, and none would not even let idle connections end.
        self._server.config.timeout_graceful_shutdown = max(1, math.ceil(grace_s))
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close()
