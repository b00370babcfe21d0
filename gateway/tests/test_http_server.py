"""Connections: what a client may hold without having asked for anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace_common.errors import ClientGone
from headrace_gateway import http_server
from headrace_gateway.http_exchange import AsgiApp, HttpExchange, Receive, Scope, Send
from headrace_gateway.http_server import HttpServer
from headrace_gateway.listener import listening_socket
from headrace_testing.waiting import eventually

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def plain_app(_scope: Scope, _receive: Receive, send: Send) -> None:
    """Answer."""
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


class HeldApp:
    """Answers when it is let."""

    def __init__(self) -> None:
        self.is_asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait, then answer."""
        self.is_asked.set()
        await self.may_answer.wait()
        await plain_app(scope, receive, send)


@contextlib.asynccontextmanager
async def serving(app: AsgiApp) -> AsyncIterator[int]:
    """Serve; yields the port."""
    server = HttpServer(app, listening_socket("127.0.0.1:0", None, shares=False), 1.0)
    task = asyncio.create_task(server.serve())
    await eventually(lambda: server.is_serving)
    yield server.port
    server.stop()
    await task


@pytest.fixture
def short_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients get half a second for a request's head."""
    monkeypatch.setattr(http_server._Protocol, "head_s", 0.5)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """A server that answers at once."""
    async with serving(plain_app) as port:
        yield port


async def what_comes(port: int, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    received = b""
    try:
        async with asyncio.timeout(30.0):
            while piece := await reader.read(65536):
                received += piece
    except ConnectionResetError:
        pass
    finally:
        writer.close()
    return received


@pytest.mark.usefixtures("short_heads")
@pytest.mark.parametrize("sent", [b"", b"GET / HT", REQUEST[:-2]])
async def test_connection_without_a_request_is_cut(port: int, sent: bytes) -> None:
    """Nothing, or half a head, and silence."""
    assert await what_comes(port, sent) == b""


@pytest.mark.usefixtures("short_heads")
async def test_answers_are_not_cut_and_what_follows_them_is() -> None:
    """The time counts for heads only, of pipelined requests too."""
    app = HeldApp()
    async with serving(app) as port:
        asking = asyncio.create_task(what_comes(port, REQUEST * 2 + b"GET"))
        await app.is_asked.wait()
        # Its time for a head is over: so would be that of the requests above.
        assert await what_comes(port, b"") == b""
        app.may_answer.set()
        assert (await asking).count(b"HTTP/1.1 204") == 2


async def test_head_is_bounded(port: int) -> None:
    """Nobody is authenticated yet."""
    answer = await what_comes(port, b"GET / HTTP/1.1\r\nx: " + b"a" * 1_000_000)
    assert answer.startswith(b"HTTP/1.1 431 ") or answer == b""


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/1.1\r\nhost : x\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_told_so_as_json(port: int, sent: bytes) -> None:
    """Even this refusal has the shape that clients read."""
    head, _, body = (await what_comes(port, sent)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"gzip\r\ntransfer-encoding: chunked"])
async def test_a_transfer_coding_that_is_not_known_is_told(port: int, coding: bytes) -> None:
    """Else the body would be taken for what it is not."""
    sent = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: %s\r\n\r\n0\r\n\r\n" % coding
    head, _, body = (await what_comes(port, sent)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 501 ")
    assert json.loads(body)["error"]["code"] == "unsupported_transfer_coding"


@pytest.mark.parametrize("rubbish", [b"rubbish\r\n", b"GET / HTTP/1.1\r\n\r\n"])
async def test_nothing_is_said_in_the_middle_of_an_answer(rubbish: bytes) -> None:
    """A client that sends rubbish behind its request ends the connection, and no more."""
    app = HeldApp()
    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        await app.is_asked.wait()
        writer.write(rubbish)
        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()
        app.may_answer.set()


@pytest.mark.parametrize(
    "fields",
    [
        b"",
        b"host: a\r\nhost: a\r\n",
        b"host: a\r\nHost: b\r\n",
        b"host: a b\r\n",
        b"host: a/b\r\n",
        b"host: u@a\r\n",
        b"host: a:b\r\n",
        b"host: a,b:c\r\n",
        b"host: [::1\r\n",
        b"host: \xc3\xa4.example\r\n",
        b"host: a%zz\r\n",
    ],
)
async def test_a_request_names_its_host_once(port: int, fields: bytes) -> None:
    """RFC 9112, 3.2: none, several or a broken one get a 400, and the connection ends."""
    head, _, body = (
        await what_comes(port, b"POST / HTTP/1.1\r\n%s\r\n" % fields + REQUEST)
    ).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_host"


@pytest.mark.parametrize(
    "host",
    [b"", b"a", b"A-b.example:8080", b"127.0.0.1:", b"[::1]:80", b"a_b", b"%C3%A4.example"],
)
@pytest.mark.parametrize("target", [b"/", b"http://a.example/"])
async def test_any_valid_host_will_do(port: int, host: bytes, target: bytes) -> None:
    """Who is called what is no concern of ours."""
    sent = b"GET %s HTTP/1.1\r\nhost: %s\r\nconnection: close\r\n\r\n" % (target, host)
    assert b"HTTP/1.1 204 " in await what_comes(port, sent)


@pytest.mark.parametrize(
    ("fields", "status"), [(b"", 204), (b"host: a\r\n", 204), (b"host: a\r\nhost: a\r\n", 400)]
)
async def test_an_older_client_need_not_name_its_host(
    port: int, fields: bytes, status: int
) -> None:
    """HTTP/1.0 had no such field; several are wrong there, too."""
    answer = await what_comes(port, b"GET / HTTP/1.0\r\n%s\r\n" % fields)
    assert answer.startswith(b"HTTP/1.1 %d " % status)


async def echo_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the method, path and body that came."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        if not message["more_body"]:
            break
    said = b"%s %s %s" % (scope["method"].encode(), scope["path"].encode(), body)
    headers = [(b"content-length", b"%d" % len(said))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": said})


OFFER = (
    b"POST /%d HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
)
SIZED = b"Content-Length: 5\r\n\r\nhello"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
PLAIN = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.fixture
async def echo_port() -> AsyncIterator[int]:
    """A server that echoes."""
    async with serving(echo_app) as port:
        yield port


@pytest.mark.parametrize("body", [SIZED, CHUNKED])
@pytest.mark.parametrize("cut", [0, 20, 180, -3])
async def test_an_offer_to_change_protocols_costs_no_body(
    echo_port: int, body: bytes, cut: int
) -> None:
    """As Java's client sends it: answered as HTTP/1.1, also pipelined and in pieces."""
    sent = OFFER % 1 + body + OFFER % 2 + body + PLAIN
    reader, writer = await asyncio.open_connection("127.0.0.1", echo_port)
    writer.write(sent[:cut])
    await asyncio.sleep(0.02)
    writer.write(sent[cut:])
    async with asyncio.timeout(30):
        received = await reader.read()
    writer.close()
    said = [part.split(b"HTTP/1.1")[0] for part in received.split(b"\r\n\r\n")[1:]]
    assert said == [b"POST /1 hello", b"POST /2 hello", b"GET /last "]


EXPECTANT = b"POST /1 HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\nexpect: 100-continue\r\n\r\n"


async def test_who_was_not_told_to_send_a_body_is_told_to_connect_anew(port: int) -> None:
    """What it sends next would be read as the body that it kept."""
    answer = await what_comes(port, EXPECTANT)
    assert answer.startswith(b"HTTP/1.1 204 ")
    assert b"\r\nconnection: close\r\n" in answer


@pytest.mark.parametrize("early", [b"", b"hello"])
async def test_a_body_that_was_waited_for_leaves_the_connection_open(
    echo_port: int, early: bytes
) -> None:
    """Whether the client waits for the 100 or not."""
    reader, writer = await asyncio.open_connection("127.0.0.1", echo_port)
    writer.write(EXPECTANT + early)
    async with asyncio.timeout(30):
        if not early:
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"hello")
        writer.write(PLAIN)
        received = await reader.read()
    writer.close()
    assert received.count(b"POST /1 hello") == 1
    assert received.endswith(b"GET /last ")


async def test_fields_behind_a_body_are_no_headers() -> None:
    """A chunked body's trailers do not reach the app, which could take one for its own header."""
    seen: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await echo_app(scope, receive, send)
        seen.extend(name for name, _ in scope["headers"])

    head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    trailers = b"authorization: Bearer x\r\n" * 1000
    async with serving(app) as port:
        answer = await what_comes(port, head + b"5\r\nhello\r\n0\r\n" + trailers + b"\r\n")
    assert answer.endswith(b"hello")
    assert b"authorization" not in seen
    assert b"host" in seen


@pytest.mark.parametrize("body", [b"zz\r\nhe", b"2\r\nhello\r\n"])
async def test_a_body_in_broken_chunks_is_told_so(echo_port: int, body: bytes) -> None:
    """Behind a whole head, too; but not in the place of an earlier request's answer."""
    head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = await what_comes(echo_port, head + body)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"content-type") == 1
    answers = await what_comes(echo_port, head + b"1\r\na\r\n0\r\n\r\n" + head + body)
    assert b"HTTP/1.1 400 " not in answers


async def streaming_app(scope: Scope, receive: Receive, _send: Send) -> None:
    """Send two events."""
    exchange = HttpExchange(scope, receive, slow_reader_s=1.0)
    await exchange.begin_stream()
    await exchange.send_events(b"data: a\n\n")
    await exchange.send_events(b"data: b\n\n", is_last=True)


async def test_an_older_client_gets_its_stream_without_chunks() -> None:
    """HTTP/1.0 knows none: the end of the connection is the end of the stream."""
    async with serving(streaming_app) as port:
        answer = await what_comes(port, b"GET / HTTP/1.0\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"data: a\n\ndata: b\n\n"


@pytest.mark.parametrize("pieces", [[100_000], [65_000, 100_000], [300_000, 300_000, 300_000]])
async def test_a_client_that_leaves_behind_a_big_body_is_noticed(pieces: list[int]) -> None:
    """Reading is paused while a body grows; who waits for the answer must still be seen to go."""
    gone, has_body = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, _send: Send) -> None:
        exchange = HttpExchange(scope, receive, slow_reader_s=1.0)
        await exchange.read_body(10_000_000)
        exchange.on_gone(gone.set)
        has_body.set()
        await gone.wait()

    async with serving(app) as port, asyncio.timeout(30):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % sum(pieces))
        for size in pieces:
            writer.write(b"x" * size)
            await writer.drain()
            await asyncio.sleep(0.01)
        await has_body.wait()
        writer.close()
        await gone.wait()


def naming_app(names: list[str], name: str) -> AsgiApp:
    """Note who answered."""

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        names.append(name)
        headers = [(b"connection", b"close")]
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    return app


async def test_several_processes_share_a_port() -> None:
    """Each gets some of the connections; when one stops the others get all; else it is refused."""
    names: list[str] = []
    listener = listening_socket("127.0.0.1:0", None, shares=True)
    first = HttpServer(naming_app(names, "a"), listener, 1.0)
    address = f"127.0.0.1:{first.port}"
    tasks = [asyncio.create_task(first.serve())]
    await eventually(lambda: first.is_serving)
    with pytest.raises(OSError, match="cannot listen"):
        listening_socket(address, None, shares=False)
    second = HttpServer(naming_app(names, "b"), listening_socket(address, None, shares=True), 1.0)
    tasks.append(asyncio.create_task(second.serve()))
    await eventually(lambda: second.is_serving)
    for _ in range(40):
        assert b" 204 " in await what_comes(first.port, REQUEST)
    assert set(names) == {"a", "b"}
    first.stop()
    await tasks[0]
    names.clear()
    for _ in range(5):
        assert b" 204 " in await what_comes(first.port, REQUEST)
    assert set(names) == {"b"}
    second.stop()
    await tasks[1]


def inherited(address: str = "127.0.0.1:0") -> tuple[socket.socket, int]:
    """A bound socket of another process, as good as, and the descriptor that it handed on."""
    host, port = address.split(":")
    held = socket.socket()
    held.bind((host, int(port)))
    return held, os.dup(held.fileno())


async def test_who_comes_between_two_servers_of_a_handed_socket_is_answered_by_the_second() -> None:
    """A server that stops takes none from then on, and nobody is refused while none is there."""
    names: list[str] = []
    held, descriptor = inherited()
    with held:
        first = HttpServer(
            naming_app(names, "a"), listening_socket("", descriptor, shares=False), 1
        )
        task = asyncio.create_task(first.serve())
        await eventually(lambda: first.is_serving)
        assert b" 204 " in await what_comes(first.port, REQUEST)
        first.stop()
        early = asyncio.create_task(what_comes(first.port, REQUEST))
        await task
        late = asyncio.create_task(what_comes(first.port, REQUEST))
        await asyncio.sleep(0.05)
        assert names == ["a"]
        listener = listening_socket("", os.dup(held.fileno()), shares=False)
        second = HttpServer(naming_app(names, "b"), listener, 1)
        task = asyncio.create_task(second.serve())
        assert b" 204 " in await early
        assert b" 204 " in await late
        assert names == ["a", "b", "b"]
        second.stop()
        await task


async def test_who_has_connected_when_the_server_stops_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A first request is waited for, within a bound; after it the connection ends."""
    monkeypatch.setattr(http_server, "_LAST_HEAD_S", 0.5)
    server = HttpServer(plain_app, listening_socket("127.0.0.1:0", None, shares=False), 90.0)
    task = asyncio.create_task(server.serve())
    await eventually(lambda: server.is_serving)
    _, silent = await asyncio.open_connection("127.0.0.1", server.port)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    await eventually(lambda: len(server.connections) == 2)
    server.stop()
    await asyncio.sleep(0.2)
    writer.write(REQUEST)
    async with asyncio.timeout(30):
        answer = await reader.read()
        assert b" 204 " in answer
        assert b"connection: close" in answer.lower()
        await task
    for one in (silent, writer):
        one.close()


def test_what_is_no_bound_tcp_socket_is_told_so(tmp_path: Path) -> None:
    """A file, a socket of another kind, one without an address, and nothing at all."""
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="cannot listen on"):
        listening_socket("", os.dup(file.fileno()), shares=False)
    for wrong in (socket.socket(type=socket.SOCK_DGRAM), socket.socket(socket.AF_UNIX)):
        with wrong, pytest.raises(OSError, match="not a bound TCP socket"):
            listening_socket("", os.dup(wrong.fileno()), shares=False)
    with socket.socket() as free, pytest.raises(OSError, match="not a bound TCP socket"):
        listening_socket("", os.dup(free.fileno()), shares=False)
    with pytest.raises(OSError, match="descriptor 999: "):
        listening_socket("", 999, shares=False)


async def test_a_client_that_does_not_read_costs_little_and_is_cut() -> None:
    """A stream without end stops at the bounds of the buffers, then the connection ends."""
    written_bytes, outcomes = 0, []

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal written_bytes
        exchange = HttpExchange(scope, receive, slow_reader_s=0.3)
        try:
            await exchange.begin_stream()
            while True:
                await exchange.send_events(b"data: " + b"x" * 4096 + b"\n\n")
                written_bytes += 4096
        except ClientGone as gone:
            outcomes.append(gone.reason)

    async with serving(endless) as port:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
        await asyncio.get_running_loop().sock_sendall(client, REQUEST)
        await eventually(lambda: outcomes)
        client.close()
    assert outcomes == ["SLOW_READER"]
    # The kernel's buffer (doubled by Linux), the server's 64 KiB, and the client's.
    assert written_bytes < 1024 * 1024
