"""One HTTP request and its answer, over raw ASGI: body limits, slow clients, clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Protocol

from headrace_common.errors import ClientGone
from headrace_gateway.error_body import (
    BodyTimeout,
    BodyTooLarge,
    Headers,
    UnsupportedEncoding,
)
from headrace_gateway.visit import EndFailed

# ASGI's own types. Any: values differ by key.
Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

# Key in the scope under which our server shows the `Connection` and the `Reply`.
CONNECTION_EXTENSION = "headrace.connection"
# Key in the scope of headers that go with any answer to this request, whatever it is.
EXTRA_HEADERS = "headrace.extra_headers"
_BODY_TIMEOUT_S = 30.0
_JSON = (b"content-type", b"application/json")
_EVENT_STREAM = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Connection(Protocol):
    """What our server tells of a connection beyond ASGI."""

    # Called once, when the connection is lost.
    watcher: Callable[[], None] | None
    is_lost: bool
    # The client reads slower than is written.
    is_paused: bool

    def cut(self) -> None:
        """End it now, unsent bytes included."""
        ...


class Reply(Protocol):
    """One request at our server: what ASGI's messages would carry, without the messages."""

    # See `request_headers.headers_by_name`.
    request_headers: Mapping[bytes, bytes]

    def whole_body(self) -> bytes | None:
        """Return the request's body if all of it is here, once."""
        ...

    def begin(self, status: int, headers: Headers, body: bytes, *, is_whole: bool) -> None:
        """Write the status line, the headers and the first of the body, or all of it."""
        ...

    def go_on(self, body: bytes, *, is_last: bool) -> None:
        """Write more of the body."""
        ...

    async def drain(self) -> None:
        """Wait until the client has read enough."""
        ...


class HttpExchange:
    """A request being answered. Reads and writes belong to one request's tasks.

    Args:
        scope, receive: ASGI's.
        slow_reader_s: a write that waits longer cuts the connection.
    """

    def __init__(self, scope: Scope, receive: Receive, slow_reader_s: float) -> None:
        self._scope, self._receive = scope, receive
        self._slow_reader_s = slow_reader_s
        # Taken: the reply knows the scope, and would be held by it in a ring.
        ours: tuple[Connection, Reply] = scope.pop(CONNECTION_EXTENSION)
        self._connection, self._reply = ours
        self._extra: Headers = scope.get(EXTRA_HEADERS) or []
        # See `request_headers.headers_by_name`.
        self.request_headers = self._reply.request_headers
        self._on_gone: Callable[[], None] = _nothing
        # Sent with the status line, whatever the answer.
        self.headers: Headers = []
        self.has_begun = False
        self.is_over = False
        self.client_is_gone = False
        self.num_events = 0
        self.client_id = ""
        self.end_failed: EndFailed | None = None

    @property
    def path(self) -> str:
        """The request's path."""
        path: str = self._scope["path"]
        return path

    @property
    def query(self) -> bytes:
        """The request's query string."""
        query: bytes = self._scope["query_string"]
        return query

    async def read_body(self, max_bytes: int) -> bytes:
        """Read the whole body.

        Raises:
            BodyTooLarge: more than *max_bytes*; nothing beyond that is kept.
            BodyTimeout: it did not come within 30 seconds.
            UnsupportedEncoding: it is compressed.
            ClientGone: the client left.
        """
        check_coding(self.request_headers.get(b"content-encoding", b""))
        # With short requests it came in one read with the head.
        if (body := self._reply.whole_body()) is not None:
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
            return body
        declared = self.request_headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > max_bytes:
            raise _too_large(max_bytes)
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                return await self._collect(max_bytes)
        except TimeoutError:
            raise BodyTimeout("The request body came too slowly.") from None

    def on_gone(self, callback: Callable[[], None] | None) -> None:
        """Call back when the client leaves before its answer is over; None = no more."""
        connection = self._connection
        self._on_gone = callback or _nothing
        if callback is None:
            # A pipelined request may watch by now.
            if connection.watcher == self._lost:
                connection.watcher = None
            return
        connection.watcher = self._lost
        if connection.is_lost:
            asyncio.get_running_loop().call_soon(self._lost)

    async def send_json(self, status: int, body: bytes, extra: Headers | None = None) -> None:
        """Send a whole answer."""
        headers = [_JSON, *self.headers, *self._extra, *(extra or ())]
        self.has_begun = self.is_over = True
        if self._connection.is_paused:
            await self._drain()
        self._reply.begin(status, headers, body, is_whole=True)

    async def begin_stream(self) -> None:
        """Send the status line of an event stream."""
        self.has_begun = True
        if self._connection.is_paused:
            await self._drain()
        self._reply.begin(200, [*_EVENT_STREAM, *self.headers, *self._extra], b"", is_whole=False)

    async def send_events(self, events: bytes, *, is_last: bool = False) -> None:
        """Send whole events."""
        self.is_over = self.is_over or is_last
        if self._connection.is_paused:
            await self._drain()
        self._reply.go_on(events, is_last=is_last)

    def try_send_events(self, events: bytes) -> bool:
        """Send whole events of a stream that has begun, unless the client reads too slowly."""
        if self._connection.is_paused or not self.has_begun or self.is_over:
            return False
        self._reply.go_on(events, is_last=False)
        return True

    def abort(self) -> None:
        """Cut the connection now, unsent bytes included."""
        self.client_is_gone = True
        self._connection.cut()

    def _lost(self) -> None:
        if not self.is_over and not self.client_is_gone:
            self.client_is_gone = True
            self._on_gone()

    async def _collect(self, max_bytes: int) -> bytes:
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.client_is_gone = True
                raise ClientGone("The client left before its request was read.")
            piece = message.get("body", b"")
            size += len(piece)
            if size > max_bytes:
                raise _too_large(max_bytes)
            pieces.append(piece)
            if not message.get("more_body", False):
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _drain(self) -> None:
        """Wait for the client to read; the server's own buffer (64 KiB) is the only one.

        Raises:
            SlowReaderError: the client did not read for `slow_reader_s`.
        """
        try:
            async with asyncio.timeout(self._slow_reader_s):
                await self._reply.drain()
        except TimeoutError:
            self.abort()
            raise SlowReaderError from None


class SlowReaderError(ClientGone):
    """The client is there and does not read."""

    reason = "SLOW_READER"

    def __init__(self) -> None:
        super().__init__("The client did not read its answer.")


def check_coding(coding: bytes) -> None:
    """Take a body as it is, or not at all.

    Raises:
        UnsupportedEncoding: it is compressed, by its `Content-Encoding`.
    """
    if coding and coding.lower() != b"identity":
        raise UnsupportedEncoding("Compressed request bodies are not supported.")


def _nothing() -> None:
    """Nobody watches."""


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than {max_bytes} bytes.")
