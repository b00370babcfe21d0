"""A process's life: start, ready, drain on SIGTERM or SIGINT, leave."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

import uvloop

from headrace_common.process_tuning import tune_process

_log = logging.getLogger(__name__)


class Lifecycle:
    """States of a service.

    ::

        starting --set_ready(True)--> ready --stop signal--> stopping

    `is_ready` may be read from any thread.
    """

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self._ready = False

    @property
    def is_ready(self) -> bool:
        """Whether new work is welcome."""
        return self._ready and not self.stopping.is_set()

    def set_ready(self, ready: bool) -> None:
        """Say whether new work is welcome."""
        self._ready = ready

    def install_signals(self) -> None:
        """Let SIGTERM and SIGINT set `stopping`; a second one ends the process at once."""
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            if self.stopping.is_set():
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            self.stopping.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)


def run(main: Coroutine[Any, Any, None]) -> None:  # Any: the coroutine's own send types
    """Tune the interpreter and run a service's main coroutine on uvloop."""
    tune_process()
    uvloop.run(main)


class App(Protocol):
    """What `serve` keeps running."""

    async def start(self) -> None:
        """Begin to serve; raise if that cannot be."""
        ...

    async def stop(self) -> None:
        """Drain and leave; also after a start that failed half-way."""
        ...


async def serve(app: App, lifecycle: Lifecycle) -> None:
    """Start *app*, run it until SIGTERM or SIGINT, and stop it, also when its start failed."""
    lifecycle.install_signals()
    try:
        await app.start()
        await lifecycle.stopping.wait()
    finally:
        await app.stop()


async def supervise(
    name: str,
    body: Callable[[], Awaitable[None]],
    *,
    first_delay_s: float = 0.1,
    max_delay_s: float = 5.0,
    on_failure: Callable[[], None] | None = None,
) -> None:
    """Run *body* again and again until cancelled; back off while it fails.

    A body that returns is started again after the first delay. Failures are logged once per change
    of text, counted by *on_failure*.
    """
    delay_s, last = first_delay_s, ""
    while True:
        started = asyncio.get_running_loop().time()
        try:
            await body()
            text = ""
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Somebody else's, let out by a library (aiokafka's stop() does): no reason to end.
            text = "CancelledError from inside"
            if on_failure is not None:
                on_failure()
        except Exception as error:  # noqa: BLE001 - supervised loop: one failure must not end the service
            text = f"{type(error).__name__}: {error}"
            if on_failure is not None:
                on_failure()
        raise_if_cancelled()
        if text and text != last:
            _log.warning("%s failed, will go on: %s", name, text)
        last = text
        if asyncio.get_running_loop().time() - started > 10 * max_delay_s:
            delay_s = first_delay_s
        await asyncio.sleep(delay_s)
        delay_s = min(delay_s * 2, max_delay_s) if text else first_delay_s


async def cancel_and_wait(*tasks: asyncio.Task[Any] | None) -> None:  # Any: results are dropped
    """Cancel tasks and wait until they are gone; their exceptions are dropped.

    If the caller is cancelled meanwhile, that goes on up: a loop that is stopped while it cleans up
    must not start its next turn.
    """
    own = asyncio.current_task()
    known = [task for task in tasks if task is not None and task is not own]
    # Most have ended by themselves; those cost no turn of the loop.
    live = [task for task in known if not task.done()]
    for task in live:
        task.cancel()
    if live:
        await asyncio.wait(live)
    for task in known:
        if not task.cancelled():
            # Marks it as seen.
            task.exception()


def raise_if_cancelled() -> None:
    """Raise the cancellation of the current task that a library has swallowed.

    On Python 3.11 `asyncio.wait_for` loses a cancellation that comes as its inner call finishes
    (bpo-37658), and redis-py sends every command through it once a socket timeout
    is set. Loops over such calls ask here after each one, or they might never end.

    Raises:
        asyncio.CancelledError: the task was asked to end.
    """
    if is_cancelled():
        raise asyncio.CancelledError


def is_cancelled() -> bool:
    """Whether the current task was asked to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
