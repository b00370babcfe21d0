"""One thread that makes blocking calls for an event loop, one after the other.

An executor's future goes through locks and callbacks on both sides, which with the interpreter's
lock changing hands costs a busy loop more than the calls that are made here some hundred times a
second. https://docs.python.org/3.11/library/asyncio-eventloop.html#asyncio.loop.run_in_executor
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")

# Any: whatever the call returns.
_Call = tuple[asyncio.AbstractEventLoop, asyncio.Future[Any], Callable[[], Any]]


class CallThread:
    """The thread, started by the first call.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name=name, daemon=True)

    async def run(self, call: Callable[[], T]) -> T:
        """Make a call there and return its result, or raise what it raises.

        It is made whether or not the caller still waits.
        """
        if self._thread.ident is None:
            self._thread.start()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        self._calls.put((loop, done, call))
        return await done

    def close(self, *, wait: bool = True) -> None:
        """End the thread behind the calls that it has; *wait* for that."""
        self._calls.put(None)
        if wait and self._thread.ident is not None:
            self._thread.join()

    def _work(self) -> None:
        while (asked := self._calls.get()) is not None:
            loop, done, call = asked
            try:
                result, error = call(), None
            except BaseException as raised:  # noqa: BLE001 - handed to whoever asked
                result, error = None, raised
            # A loop that was closed meanwhile has nobody who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_tell, done, result, error)
            del asked, done, call, result, error


def _tell(done: asyncio.Future[T], result: T, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
