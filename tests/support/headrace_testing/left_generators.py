"""Asynchronous generators that were left before their end: each is closed by a task of its own."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from inspect import isasyncgen
from typing import Any


@contextmanager
def left_generators() -> Iterator[list[str]]:
    """Note file and name of those that the running loop closes inside the block."""
    loop, left = asyncio.get_running_loop(), list[str]()

    def note(
        loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None], **named: Any
    ) -> asyncio.Task[None]:
        left.extend(
            f"{it.ag_code.co_filename}: {it.__qualname__}"
            for it in gc.get_referents(work)
            if isasyncgen(it)
        )
        return asyncio.Task(work, loop=loop, **named)

    loop.set_task_factory(note)
    try:
        yield left
    finally:
        loop.set_task_factory(None)
