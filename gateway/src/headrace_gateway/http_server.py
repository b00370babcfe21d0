"""Our uvicorn: HTTP/1.1 by httptools, started and stopped by the service's own lifecycle."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace_common.settings import split_address
from headrace_gateway.http_exchange import CONNECTION_EXTENSION, AsgiApp

# Above the usual 60 s of load balancers, so that they close idle connections and not we.
_KEEP_ALIVE_S = 75
# From the connection's start, or from the last answer, a request's head must be complete within
# this time: who sends nothing, or a byte now and then, holds no connection for ever.
_HEAD_S = 90.0
# Read at most, beyond one chunk of the socket's, before it is known who calls.
_MAX_HEAD_BYTES = 64 * 1024
_HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"connection: close\r\ncontent-length: 0\r\n\r\n"
)
_BACKLOG = 2048
_LAST_WORDS_S = 5.0
# What the kernel may keep unsent per connection. Left to itself it grows to megabytes, and a client
# that does not read would be noticed only then.
_SEND_BUFFER_BYTES = 256 * 1024


class _Protocol(HttpToolsProtocol):
    """Bounds a request's head in time and size; shows itself to the app as its `Connection`.

    uvicorn bounds neither with httptools. At an offer to change protocols (`Upgrade: h2c`, made by
    Java's client with its first request) the parser ends the request behind its head; here the
    offer is passed over, as HTTP allows, and a parser that saw no offer reads the body.
    """

    head_s = _HEAD_S
    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _is_in_head = False
    # The head that the parser reads next was read before.
    _skips_head = False

    watcher: Callable[[], None] | None = None
    is_lost = False

    @property
    def is_paused(self) -> bool:
        return self.flow.write_paused

    def cut(self) -> None:
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self.is_lost = True
        if self.watcher is not None:
            self.watcher()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._pass_over_upgrade(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._refuse_head()

    def on_message_begin(self) -> None:
        if self._skips_head:
            return
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0
        self.scope["extensions"] = {CONNECTION_EXTENSION: {"is": self}}

    def on_url(self, url: bytes) -> None:
        if not self._skips_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._skips_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._skips_head:
            self._skips_head = False
            return
        self._is_in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:
            self._expect_head()

    def _pass_over_upgrade(self, rest: bytes) -> None:
        lengths = [
            b"%s: %s\r\n" % (name, value)
            for name, value in self.headers
            if name in (b"content-length", b"transfer-encoding")
        ]
        self.parser = httptools.HttpRequestParser(self)
        self._skips_head = True
        self.data_received(b"".join((b"POST / HTTP/1.1\r\n", *lengths, b"\r\n", rest)))

    def _expect_head(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(self.head_s, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_head(self) -> None:
        self._is_in_head = False
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_HEAD_TOO_LARGE)
        self.transport.close()


class _Server(uvicorn.Server):
    """Leaves signals to `Lifecycle`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves one ASGI application.

    Args:
        app: the application; gets no lifespan events.
        address: host:port; port 0 takes a free one, see `port`.
        drain_grace_s: running requests get so long to finish after `stop`.
        shares_port: whether other processes may listen on the same address too.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(
        self, app: AsgiApp, address: str, drain_grace_s: float, *, shares_port: bool = False
    ) -> None:
        self._socket = _bound(address, shares_port)
        self.port: int = self._socket.getsockname()[1]
        self._server = _Server(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(drain_grace_s)),
            )
        )

    async def serve(self) -> None:
        """Serve until `stop`; returns once running requests are over or the grace has ended."""
        await self._server.serve(sockets=[self._socket])
        tasks = self._server.server_state.tasks
        if tasks:
            # Those that outlasted the grace were cancelled; they still have to close their books.
            await asyncio.wait(tasks, timeout=_LAST_WORDS_S)

    def stop(self) -> None:
        """Take no new connections and end `serve`."""
        self._server.should_exit = True


def _bound(address: str, shares_port: bool) -> socket.socket:
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        if shares_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host.strip("[]"), port))
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"cannot listen on {address}: {error.strerror}") from error
    return bound
