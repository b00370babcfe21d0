"""A way to a server that can be frozen: connections stay open, new ones are taken, nothing passes.

As a process stopped by SIGSTOP looks from outside, without a process.
"""

from __future__ import annotations

import asyncio

from headrace_common.settings import split_address


class FreezableWay:
    """Passes bytes on between clients and a server. Use as an async context manager.

    Args:
        target: host:port of the server.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._flows = asyncio.Event()
        self._flows.set()
        self._server: asyncio.Server | None = None
        self._running: set[asyncio.Task[None]] = set()
        self.address = ""

    def freeze(self) -> None:
        """Let nothing pass."""
        self._flows.clear()

    def thaw(self) -> None:
        """Let pass what has gathered, and what comes."""
        self._flows.set()

    async def __aenter__(self) -> FreezableWay:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            await self._flows.wait()
            host, port = split_address(self._target)
            far_reader, far_writer = await asyncio.open_connection(host, port)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._pass(reader, far_writer))
                    both.create_task(self._pass(far_reader, writer))
            finally:
                far_writer.close()
        except* OSError:
            pass
        finally:
            writer.close()
            self._running.discard(task)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            await self._flows.wait()
            sink.write(data)
            await sink.drain()
        sink.close()
