"""Our uvicorn: HTTP/1.1 by httptools, started and stopped by the service's own lifecycle."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet

import httptools
import orjson
import uvicorn
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from headrace_gateway.error_body import Headers
from headrace_gateway.http_exchange import CONNECTION_EXTENSION, AsgiApp
from headrace_gateway.request_headers import headers_by_name

# Above the usual 60 s of load balancers, so that they close idle connections and not we.
_KEEP_ALIVE_S = 75
# From the connection's start, or from the last answer, a request's head must be complete within
# this time: who sends nothing, or a byte now and then, holds no connection for ever.
_HEAD_S = 90.0
# The same for a connection on which nothing was asked yet when the server stops.
_LAST_HEAD_S = 1.0
# Read at most, beyond one chunk of the socket's, before it is known who calls.
_MAX_HEAD_BYTES = 64 * 1024
_BACKLOG = 2048
_LAST_WORDS_S = 5.0


def _last_words(status: bytes, message: str, code: str) -> bytes:
    """Return a whole answer, in the usual shape, to what never became a request."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    body = orjson.dumps({"error": error})
    return (
        b"HTTP/1.1 %s\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"content-length: %d\r\n\r\n%s" % (status, len(body), body)
    )


_HEAD_TOO_LARGE = _last_words(
    b"431 Request Header Fields Too Large", "The request's head is too large.", "head_too_large"
)
_NOT_HTTP = _last_words(b"400 Bad Request", "This is not valid HTTP/1.1.", "invalid_http")
_NO_CODING = _last_words(
    b"501 Not Implemented",
    "The only transfer coding that is understood is chunked.",
    "unsupported_transfer_coding",
)
_NO_HOST = _last_words(
    b"400 Bad Request", "A request names its host once: send one valid Host header.", "invalid_host"
)
# RFC 9110, 7.2: a name, an IPv4 or a bracketed IPv6 address, or nothing; then maybe a port.
_HOST = re.compile(rb"(\[[\w.:~-]+\]|(?:[\w.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(:\d*)?")


class _Reply:
    """uvicorn's cycle of one request, read and written without ASGI's messages.

    A whole answer is one write; names and values of headers are looked through once, together.
    """

    def __init__(self, cycle: RequestResponseCycle, request_headers: Mapping[bytes, bytes]) -> None:
        self._cycle, self.request_headers = cycle, request_headers

    def whole_body(self) -> bytes | None:
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        return body

    def begin(self, status: int, headers: Headers, body: bytes, *, is_whole: bool) -> None:
        cycle = self._cycle
        if cycle.disconnected:
            return
        cycle.response_started, cycle.waiting_for_100_continue = True, False
        fields = cycle.default_headers + headers
        block = b"\r\n".join([*map(b": ".join, fields), b""])
        if not block.count(b"\n") == block.count(b"\r") == len(fields) or b"\0" in block:
            raise RuntimeError("a header would break the answer's head")
        end = b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n"
        if is_whole:
            cycle.chunked_encoding = False
            size = b"content-length: %d\r\n" % len(body)
            if cycle.scope["method"] == "HEAD":
                body = b""
            cycle.transport.write(b"".join((STATUS_LINE[status], block, size, end, body)))
            self._complete()
        else:
            # HTTP/1.0 knows no chunks: there the connection's end is the body's (RFC 9112, 6.1).
            cycle.chunked_encoding = cycle.scope["http_version"] != "1.0"
            chunked = b"transfer-encoding: chunked\r\n" if cycle.chunked_encoding else b""
            cycle.transport.write(b"".join((STATUS_LINE[status], block, chunked, end)))

    def go_on(self, body: bytes, *, is_last: bool) -> None:
        cycle = self._cycle
        if cycle.disconnected or cycle.response_complete:
            return
        if cycle.chunked_encoding:
            chunk = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
            cycle.transport.write(chunk + b"0\r\n\r\n" if is_last else chunk)
        else:
            cycle.transport.write(body)
        if is_last:
            self._complete()

    async def drain(self) -> None:
        await self._cycle.flow.drain()

    def _complete(self) -> None:
        cycle = self._cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()


class _Protocol(HttpToolsProtocol):
    """Bounds a request's head in time and size; shows itself to the app as its `Connection`.

    uvicorn bounds neither with httptools, and takes fields behind a chunked body for headers. At an
    offer to change protocols (`Upgrade: h2c`, made by Java's client with its first request) the
    parser ends the request behind its head; here the offer is passed over, as HTTP allows, and a
    parser that saw no offer reads the body.
    """

    head_s = _HEAD_S
    # One timer for both bounds; requests only move them. Idle time may end some seconds late.
    _timer: asyncio.TimerHandle | None = None
    _head_due_s = _idle_due_s = math.inf
    _head_bytes = 0
    _is_in_head = False
    # The head that the parser reads next was read before.
    _skips_head = False
    # What is said when the parser, or a check of ours that it calls, gives up.
    _complaint = _NOT_HTTP

    watcher: Callable[[], None] | None = None
    is_lost = is_paused = False

    # The server stops, and waits for the first request of this connection.
    _is_last = False
    # Whether the connection goes on behind the request that is read, once all of it is.
    _keeps_alive = True

    def cut(self) -> None:
        self.transport.abort()

    def shutdown(self) -> None:
        """As uvicorn's own, except that who has just connected may still ask."""
        if self.cycle is None:
            self._is_last, self._head_due_s = True, self.loop.time() + _LAST_HEAD_S
            if self._timer is not None:
                self._timer.cancel()
            self._look_again(self.loop.time())
        else:
            self._keeps_alive = False
            super().shutdown()

    def pause_writing(self) -> None:
        self.is_paused = True
        super().pause_writing()

    def resume_writing(self) -> None:
        self.is_paused = False
        super().resume_writing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)
        self.is_lost, self.is_paused = True, False
        if self.watcher is not None:
            self.watcher()

    def data_received(self, data: bytes) -> None:
        self._idle_due_s = math.inf
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._pass_over_upgrade(data[offer.args[0] :])
        except httptools.HttpParserError:
            self._refuse(self._complaint)
            return
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._is_in_head = False
                self._refuse(_HEAD_TOO_LARGE)

    def on_message_begin(self) -> None:
        if self._skips_head:
            return
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0

    def on_url(self, url: bytes) -> None:
        if not self._skips_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Fields behind the body are none of the head's, and could be any number.
        if self._is_in_head and not self._skips_head:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._skips_head:
            self._skips_head = False
            return
        self._is_in_head = False
        self._head_due_s = math.inf
        headers = headers_by_name(self.headers)
        self._check_host(headers.get(b"host"))
        # A body of another coding would be read without being decoded (RFC 9112, 6.1).
        if headers.get(b"transfer-encoding", b"chunked").strip().lower() != b"chunked":
            self._complaint = _NO_CODING
            raise ValueError("a transfer coding that is not known")
        self.expect_100_continue = headers.get(b"expect", b"").lower() == b"100-continue"
        super().on_headers_complete()
        if self._is_last:
            self.cycle.keep_alive = False
        self._keeps_alive = self.cycle.keep_alive
        if self.expect_100_continue:
            # Answered before it was told to send its body a client may never send it, and its next
            # request would be read as that body (RFC 9110, 10.1.1).
            self.cycle.keep_alive = False
        self.scope[CONNECTION_EXTENSION] = self, _Reply(self.cycle, headers)  # type: ignore[literal-required]

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            if self.expect_100_continue and not self.cycle.response_started:
                self.cycle.keep_alive = self._keeps_alive
            super().on_message_complete()
            if not self.pipeline:
                # Paused by a big body, the transport would not see its client leave.
                self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """As uvicorn's own, which sets a timer anew for each answer."""
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
            else:
                self._idle_due_s = self.loop.time() + self.timeout_keep_alive
        if self.cycle.response_complete:
            self._expect_head()

    def _check_host(self, host: bytes | None) -> None:
        """Raise, which ends the connection, at what RFC 9112 (3.2) says is answered with 400."""
        is_old = host is None and self.parser.get_http_version() == "1.0"
        if not is_old and (host is None or _HOST.fullmatch(host) is None):
            self._complaint = _NO_HOST
            raise ValueError("no host, or several, or one that is none")

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
        self._head_due_s = self.loop.time() + self.head_s
        if self._timer is None:
            self._look_again(self.loop.time())

    def _look_again(self, now_s: float) -> None:
        self._timer = None
        due_s = min(self._head_due_s, self._idle_due_s)
        if due_s < math.inf:
            self._timer = self.loop.call_later(due_s - now_s, self._look)

    def _look(self) -> None:
        now_s = self.loop.time()
        if now_s >= self._head_due_s:
            self.transport.abort()
            return
        if now_s >= self._idle_due_s:
            self._idle_due_s = math.inf
            self.transport.close()
        self._look_again(now_s)

    def _refuse(self, told: bytes) -> None:
        # In the middle of an answer, or before that of an earlier request, nothing can be said.
        cycle = self.cycle
        is_free = cycle is None or cycle.response_complete
        if is_free or (not cycle.response_started and cycle.more_body and not self.pipeline):
            self.transport.write(told)
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
        listener: where to listen, see `listener.listening_socket`; closed by `stop`.
        drain_grace_s: running requests get so long to finish after `stop`.
    """

    def __init__(self, app: AsgiApp, listener: socket.socket, drain_grace_s: float) -> None:
        self._socket = listener
        self.port: int = self._socket.getsockname()[1]
        self._server = _Server(
            uvicorn.Config(
                app,
                interface="asgi3",
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

    @property
    def is_serving(self) -> bool:
        """Whether connections are taken."""
        return bool(self._server.started)

    @property
    def connections(self) -> AbstractSet[object]:
        """Those that are open."""
        return self._server.server_state.connections

    async def serve(self) -> None:
        """Serve until `stop`; returns once running requests are over or the grace has ended."""
        await self._server.serve(sockets=[self._socket])
        tasks = self._server.server_state.tasks
        if tasks:
            # Those that outlasted the grace were cancelled; they still have to close their books.
            await asyncio.wait(tasks, timeout=_LAST_WORDS_S)

    def stop(self) -> None:
        """Take no new connections, from now on, and end `serve`."""
        if self._server.started:
            # Uvicorn would do so a turn of its clock later, and what is taken by then is dropped.
            for server in self._server.servers:
                server.close()
        self._server.should_exit = True
