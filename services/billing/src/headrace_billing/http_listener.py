"""A small HTTP server inside the service: started and stopped by its lifecycle, not by signals."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from headrace_common.settings import address_family, split_address

_BACKLOG = 128
# From the connection's start, or from the last answer, until the next request's head is complete.
_HEAD_S = 10.0


class _Protocol(H11Protocol):
    """uvicorn's, which bounds a head's size (64 KiB) when h11 reads it, but not its time."""

    head_s = _HEAD_S
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._stop_waiting_if_under_way()

    def on_response_complete(self) -> None:
        self._expect_head()
        super().on_response_complete()
        # The next one may have come with the last.
        self._stop_waiting_if_under_way()

    def _expect_head(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(self.head_s, self.transport.abort)

    def _stop_waiting_if_under_way(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


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
        self._socket = socket.create_server(
            (host, port), family=address_family(host), backlog=_BACKLOG
        )
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
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
