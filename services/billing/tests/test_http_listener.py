"""Heads of the admin API are bounded in size and time, whoever sends them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from fastapi import FastAPI

from headrace_billing import http_listener
from headrace_billing.http_listener import HttpListener
from headrace_common.lifecycle import cancel_and_wait

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """A listener that gives a fifth of a second for a head."""
    monkeypatch.setattr(http_listener._Protocol, "head_s", 0.2)
    app = FastAPI()

    @app.get("/")
    async def answer() -> str:
        return "here"

    @app.get("/slow")
    async def answer_slowly() -> str:
        await asyncio.sleep(0.4)
        return "late"

    listener = HttpListener(app, "127.0.0.1:0")
    listener.start()
    yield listener.port
    await listener.stop(0)


async def ask(port: int, sent: bytes) -> bytes:
    """Return all that comes until the other side ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(30):
            writer.write(sent)
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize("sent", [b"", GET[:-2], GET + GET[:-2]], ids=["none", "half", "second"])
async def test_who_sends_no_whole_head_is_cut_off(port: int, sent: bytes) -> None:
    """The first request is answered, and not cut short by the time of the next."""
    assert (await ask(port, sent)).count(b"here") == sent.count(b"\r\n\r\n")


@pytest.mark.parametrize("begin", [b"GET / HT", GET.replace(b"x", b"x\r\ncontent-length: 99")])
async def test_a_byte_now_and_then_does_not_help(port: int, begin: bytes) -> None:
    """Of a head, or of a body that nobody reads."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(begin)

    async def go_on() -> None:
        while not writer.is_closing():
            writer.write(b"x")
            await asyncio.sleep(0.05)

    writing = asyncio.create_task(go_on())
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(30):
            await reader.read()
    await cancel_and_wait(writing)
    writer.close()


async def test_an_answer_may_take_longer_than_a_head(port: int) -> None:
    """The bound is for heads only."""
    slow = GET.replace(b"/ ", b"/slow ", 1).replace(b"x", b"x\r\nconnection: close")
    assert b"late" in await ask(port, slow)


async def test_a_head_may_not_be_of_any_size(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused as soon as it is too large."""
    monkeypatch.setattr(http_listener._Protocol, "head_s", 60)
    begin = GET[:-2] + b"long: "
    assert (await ask(port, begin + b"x" * 65_600)).startswith(b"HTTP/1.1 400 ")
