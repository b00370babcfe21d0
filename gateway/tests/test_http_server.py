"""Connections: what a client may hold without having asked for anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace_gateway import http_server
from headrace_gateway.http_exchange import Receive, Scope, Send
from headrace_gateway.http_server import HttpServer

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def slow_app(_scope: Scope, _receive: Receive, send: Send) -> None:
    """Answer after a second."""
    await asyncio.sleep(1.0)
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """A server whose clients get half a second for a request's head."""
    monkeypatch.setattr(http_server._Protocol, "head_s", 0.5)
    server = HttpServer(slow_app, "127.0.0.1:0", 1.0)
    serving = asyncio.create_task(server.serve())
    yield server.port
    server.stop()
    await serving


async def what_comes(port: int, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    received = b""
    try:
        async with asyncio.timeout(5.0):
            while piece := await reader.read(65536):
                received += piece
    except ConnectionResetError:
        pass
    finally:
        writer.close()
    return received


@pytest.mark.parametrize("sent", [b"", b"GET / HT", REQUEST[:-2]])
async def test_connection_without_a_request_is_cut(port: int, sent: bytes) -> None:
    """Nothing, or half a head, and silence."""
    assert await what_comes(port, sent) == b""


async def test_answers_are_not_cut_and_what_follows_them_is(port: int) -> None:
    """The time counts for heads only, of pipelined requests too."""
    assert (await what_comes(port, REQUEST * 2 + b"GET")).count(b"HTTP/1.1 204") == 2


async def test_head_is_bounded(port: int) -> None:
    """Nobody is authenticated yet."""
    answer = await what_comes(port, b"GET / HTTP/1.1\r\nx: " + b"a" * 1_000_000)
    assert answer.startswith(b"HTTP/1.1 431 ") or answer == b""
