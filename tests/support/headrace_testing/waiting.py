"""Waiting for something to become true, with a bound."""

from __future__ import annotations

import asyncio
import inspect
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import SystemRandom
from typing import TypeVar

T = TypeVar("T")


async def eventually(
    probe: Callable[[], T | Awaitable[T]], *, within_s: float = 30.0, every_s: float = 0.02
) -> T:
    """Return the first true result of *probe*; an AssertionError from it counts as "not yet".

    The bound is for what never comes: a busy machine may take seconds for anything.

    Raises:
        AssertionError: it did not come true within the bound.
    """
    end_s = time.monotonic() + within_s
    last: object = None
    while True:
        try:
            result = probe()
            value: T = await result if inspect.isawaitable(result) else result
            if value:
                return value
            last = value
        except AssertionError as error:
            last = error
        if time.monotonic() > end_s:
            raise AssertionError(f"not true within {within_s} s, last: {last!r}")
        await asyncio.sleep(every_s)


async def turns_during(work: Awaitable[T]) -> tuple[T, int]:
    """Return what comes of *work*, and how many turns others on its loop had meanwhile."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    try:
        return await work, turns
    finally:
        running.cancel()


def eventually_sync(probe: Callable[[], T], *, within_s: float = 30.0, every_s: float = 0.05) -> T:
    """`eventually` for tests without an event loop."""
    end_s = time.monotonic() + within_s
    while True:
        try:
            if value := probe():
                return value
            last: object = value
        except AssertionError as error:
            last = error
        if time.monotonic() > end_s:
            raise AssertionError(f"not true within {within_s} s, last: {last!r}")
        time.sleep(every_s)


def free_port() -> int:
    """Return a loopback port that was free a moment ago.

    It is none that the system gives to whoever asks for any: it stays free while a server that was
    killed starts again, and no server of another test answers there meanwhile.
    """
    while True:
        with socket.socket() as probe, suppress(OSError):
            port = SystemRandom().randrange(10_000, 20_000)
            probe.bind(("127.0.0.1", port))
            return port
