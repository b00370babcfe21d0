"""Is a child ready? One short question each, over its own protocol, bounded in time."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable

from headrace_common.awake import awake_timeout
from headrace_common.settings import split_address

PROBE_TIMEOUT_S = 2.0
_KAFKA_API_VERSIONS = struct.pack(">hhih", 18, 0, 1, -1)  # v0, correlation id 1, no client id

Probe = Callable[[], Awaitable[bool]]


def http_ready(address: str) -> Probe:
    """Return a probe that wants 200 from ``/ready``."""

    async def probe() -> bool:
        request = f"GET /ready HTTP/1.0\r\nHost: {address}\r\n\r\n".encode()
        status_line = await _ask(address, request, lambda reader: reader.readline())
        return status_line.split(b" ")[1:2] == [b"200"]

    return probe


def redis_ready(address: str) -> Probe:
    """Return a probe that wants PONG; a server that still loads its data is not ready."""

    async def probe() -> bool:
        return await _ask(address, b"PING\r\n", lambda reader: reader.readline()) == b"+PONG\r\n"

    return probe


def kafka_ready(address: str) -> Probe:
    """Return a probe that wants an answer to ApiVersions."""

    async def probe() -> bool:
        request = struct.pack(">i", len(_KAFKA_API_VERSIONS)) + _KAFKA_API_VERSIONS
        answer = await _ask(address, request, lambda reader: reader.readexactly(8))
        return bool(struct.unpack(">ii", answer)[1] == 1)

    return probe


async def is_ready(probe: Probe) -> bool:
    """Run a probe; whatever goes wrong means no."""
    try:
        # Not wait_for: before Python 3.12 it may swallow a cancellation (python/cpython#86296).
        async with awake_timeout(PROBE_TIMEOUT_S):
            return await probe()
    except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
        return False


async def _ask(
    address: str, request: bytes, read: Callable[[asyncio.StreamReader], Awaitable[bytes]]
) -> bytes:
    reader, writer = await asyncio.open_connection(*split_address(address))
    try:
        writer.write(request)
        await writer.drain()
        return await read(reader)
    finally:
        writer.close()
