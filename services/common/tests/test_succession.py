"""Handing over to a successor."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest
from prometheus_client import CollectorRegistry

from headrace_common.metrics import ObservabilityServer
from headrace_common.succession import Succession, inherited_listener


async def test_it_tells_that_it_leaves_and_waits_for_the_end_of_the_line() -> None:
    """The address of its metrics is free by then."""
    ours, theirs = socket.socketpair()
    shown = ObservabilityServer("127.0.0.1", 0, CollectorRegistry(), lambda: True)
    succession = Succession(theirs.detach())
    with ours:
        ours.setblocking(False)
        waiting = asyncio.create_task(succession.until_served(shown))
        assert await asyncio.get_running_loop().sock_recv(ours, 1) == b"1"
        socket.create_server(("127.0.0.1", shown.port)).close()
        assert not waiting.done()
    await waiting
    succession.close()
    shown.close()


async def test_nobody_is_waited_for_without_a_line_or_when_it_has_ended() -> None:
    """A process alone, or one whose fleet stops, drains at once."""
    await Succession(None).until_served(None)
    ours, theirs = socket.socketpair()
    ours.close()
    succession = Succession(theirs.detach())
    async with asyncio.timeout(10):
        await succession.until_served(None)
    succession.close()


def test_a_descriptor_of_something_else_is_refused_by_its_number() -> None:
    """The message says what it was for."""
    reading, writing = os.pipe()
    with pytest.raises(OSError, match=f"cannot hand over by descriptor {reading}"):
        Succession(reading)
    with pytest.raises(OSError, match=f"cannot listen on descriptor {writing}"):
        inherited_listener(writing)
    with socket.socket() as unbound, pytest.raises(OSError, match="not a bound TCP socket"):
        inherited_listener(os.dup(unbound.fileno()))
    os.close(reading)
    os.close(writing)
