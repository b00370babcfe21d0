"""Time in which this process could run.

A process that stood still (no CPU, SIGSTOP, a frozen container) finds that the clock has gone on
without it, and its timers due before it has read what came meanwhile or sent what it had to say. It
must not take its own pause for the silence of others.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace_common.clock import Clock

_LOOK_EACH_S = 0.5
MOST_BETWEEN_LOOKS_S = 1.0
# A timer so late says that this process did not run.
STALL_S = 0.05
MAX_STALLS = 3


class AwakeClock:
    """A clock whose seconds are those in which this process ran. Any thread.

    Between two looks at the machine's clock no more than a second passes: whoever uses this one
    looks more often than that, or lets `start` do it.

    Args:
        clock: the machine's time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._looked_s, self._awake_s = clock.now_s(), 0.0
        self._stopped = threading.Event()
        self.unix_s = clock.unix_s

    def start(self) -> None:
        """Look at the clock from a thread until `stop`, however seldom anybody asks."""
        threading.Thread(target=self._look, name="awake-clock", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    def now_s(self) -> float:
        """Return the seconds since this clock was made."""
        with self._lock:
            now_s = self._clock.now_s()
            self._awake_s += min(now_s - self._looked_s, MOST_BETWEEN_LOOKS_S)
            self._looked_s = now_s
            return self._awake_s

    def _look(self) -> None:
        while not self._stopped.wait(_LOOK_EACH_S):
            self.now_s()


@asynccontextmanager
async def awake_timeout(delay_s: float | None) -> AsyncIterator[None]:
    """Bound a block as `asyncio.timeout` does, but begin anew when this process stood still.

    Args:
        delay_s: for the block; None = for ever.

    Raises:
        TimeoutError: the block took too long.
    """
    async with asyncio.timeout(None) as bound:
        if delay_s is None:
            yield
            return
        alarm = _Alarm(bound, delay_s)
        try:
            yield
        finally:
            alarm.timer.cancel()


class _Alarm:
    """Ends a time-out, unless it rings late."""

    def __init__(self, bound: asyncio.Timeout, delay_s: float) -> None:
        self._bound, self._delay_s = bound, delay_s
        self._loop = asyncio.get_running_loop()
        self.timer = self._set(MAX_STALLS)

    def _set(self, stalls_left: int) -> asyncio.TimerHandle:
        due_s = self._loop.time() + self._delay_s
        return self._loop.call_later(self._delay_s, self._ring, due_s, stalls_left)

    def _ring(self, due_s: float, stalls_left: int) -> None:
        now_s = self._loop.time()
        if now_s - due_s >= STALL_S and stalls_left:
            self.timer = self._set(stalls_left - 1)
        else:
            self._bound.reschedule(now_s)
