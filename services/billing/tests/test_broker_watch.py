"""The connection that tells when a broker goes away."""

import asyncio
import contextlib

import pytest

from headrace_billing.broker_watch import BrokerWatch
from headrace_testing.waiting import eventually, free_port


async def test_a_closed_connection_breaks_the_watch() -> None:
    """Also if another broker listens there a moment later."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    watch = BrokerWatch(f"127.0.0.1:{port},127.0.0.1:1")
    assert watch.is_broken
    async with watch:
        assert not watch.is_broken
        await eventually(lambda: writers)
        writers[0].close()
        await writers[0].wait_closed()
        await eventually(lambda: watch.is_broken)
        async with BrokerWatch(f"127.0.0.1:{port}") as again:
            assert not again.is_broken
        assert watch.is_broken
    for writer in writers:
        writer.close()
    server.close()
    await server.wait_closed()


async def test_a_connection_is_replaced_before_the_broker_ends_it_for_being_idle() -> None:
    """That would be taken for another broker, and nothing is swept after that for the grace."""
    ended: list[asyncio.StreamReader] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(30):
                await reader.read()
                ended.append(reader)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with BrokerWatch(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", 0.2) as watch:
        for _ in range(30):
            await asyncio.sleep(0.1)
            await watch.refresh()
            assert not watch.is_broken
        assert len(ended) > 5
        server.close()
        # No new one can be opened: the old one stays, and its end is seen.
        await asyncio.sleep(0.3)
        with pytest.raises(OSError, match="Connect call failed"):
            await watch.refresh()
        await eventually(lambda: watch.is_broken)


async def test_an_absent_broker_cannot_be_watched() -> None:
    """Whoever connects learns it at once."""
    with pytest.raises(OSError, match="Connect call failed"):
        async with BrokerWatch(f"127.0.0.1:{free_port()}"):
            pass
