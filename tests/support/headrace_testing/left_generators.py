"""Asynchronous generators that were left before their end: each is closed by a task of its own."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from inspect import isasyncgen
from typing import Any, cast


@contextmanager
def left_generators() -> Iterator[list[str]]:
    """Note file and name of those that the running loop closes inside the block."""
    loop, left = asyncio.get_running_loop(), list[str]()

    # Any: whatever a task's work yields and returns; its name and context.
    def note(
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        **named: Any,
    ) -> asyncio.Task[Any]:
        left.extend(
            f"{it.ag_code.co_filename}: {it.__qualname__}"
            for it in gc.get_referents(work)
            if isasyncgen(it)
        )
        return asyncio.Task(cast("Coroutine[Any, Any, Any]", work), loop=loop, **named)

    loop.set_task_factory(note)
    try:
        yield left
    finally:
        loop.set_task_factory(None)
