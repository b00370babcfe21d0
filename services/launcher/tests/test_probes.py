"""Readiness over each protocol, against real servers."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from headrace_launcher import probes
from headrace_launcher.ports import free_ports
from headrace_testing.servers import LocalServer


@pytest.fixture
async def answering() -> AsyncIterator[dict[str, bytes]]:
    """A server that gives one fixed answer; an empty one keeps the caller waiting."""
    state = {"address": b"", "answer": b""}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(state["answer"])
        if not state["answer"]:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    state["address"] = f"127.0.0.1:{server.sockets[0].getsockname()[1]}".encode()
    yield state
    server.close()


@pytest.mark.parametrize(
    ("answer", "ready"),
    [
        (b"HTTP/1.0 200 OK\r\n\r\n", True),
        (b"HTTP/1.0 503 Service Unavailable\r\n\r\n", False),
        (b"HTTP/1.0 404 200\r\n\r\n", False),
        (b"garbage\r\n", False),
        (b"\r\n", False),
    ],
)
async def test_http_is_ready_only_with_status_200(answering, answer: bytes, ready: bool) -> None:
    """Anything else is not ready, never an exception."""
    answering["answer"] = answer
    assert await probes.is_ready(probes.http_ready(answering["address"].decode())) is ready


async def test_a_server_that_says_nothing_is_not_ready(answering, monkeypatch) -> None:
    """A frozen process accepts connections in its kernel; the probe has a time limit."""
    monkeypatch.setattr(probes, "PROBE_TIMEOUT_S", 0.2)
    address = answering["address"].decode()
    for make in (probes.http_ready, probes.redis_ready, probes.kafka_ready):
        assert not await probes.is_ready(make(address))


async def test_an_answer_that_lies_unread_is_one(answering, monkeypatch) -> None:
    """The launcher stood still; its child did not."""
    monkeypatch.setattr(probes, "PROBE_TIMEOUT_S", 0.2)
    answering["answer"] = b"HTTP/1.0 200 OK\r\n\r\n"
    address = answering["address"].decode()
    asked = asyncio.create_task(probes.is_ready(probes.http_ready(address)))
    await asyncio.sleep(0)
    time.sleep(0.4)  # noqa: ASYNC251 - that the loop stands still is the point
    assert await asked


async def test_nobody_listening_is_not_ready() -> None:
    """Connection refused."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    for make in (probes.http_ready, probes.redis_ready, probes.kafka_ready):
        assert not await probes.is_ready(make(address))


async def test_a_real_store_and_a_real_broker_are_ready(
    redis_server: LocalServer, kafka_server: LocalServer
) -> None:
    """Each by its own protocol, and neither by the other's."""
    redis, kafka = f"127.0.0.1:{redis_server.port}", f"127.0.0.1:{kafka_server.port}"
    assert await probes.is_ready(probes.redis_ready(redis))
    assert await probes.is_ready(probes.kafka_ready(kafka))
    assert not await probes.is_ready(probes.http_ready(redis))


@pytest.mark.parametrize("num_turns", range(4))
async def test_a_probe_that_is_cancelled_as_it_succeeds_stays_cancelled(num_turns: int) -> None:
    """Otherwise the loop around it would go on for ever, and the fleet could not stop."""
    answered = asyncio.Event()

    async def probe() -> bool:
        return await answered.wait()

    task = asyncio.create_task(probes.is_ready(probe))
    await asyncio.sleep(0.01)
    answered.set()
    for _ in range(num_turns):  # of the loop, so that one of them meets the moment in between
        await asyncio.sleep(0)
    if task.cancel():
        with pytest.raises(asyncio.CancelledError):
            await task
