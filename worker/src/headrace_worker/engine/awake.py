"""How long this process has been able to run.

A process that is suspended (SIGSTOP, a frozen container) and goes on later finds that the machine's
clock has gone on without it. Whoever asks how long nothing has happened must not count that time.
So a thread looks at the clock twice a second, and between two looks no more than a second passes.
"""

from __future__ import annotations

import threading

from headrace_common.clock import Clock

_LOOK_EACH_S = 0.5
MOST_BETWEEN_LOOKS_S = 1.0


class AwakeClock:
    """Seconds in which this process was not suspended. Any thread.

    Args:
        clock: the machine's time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._looked_s, self._awake_s = clock.now_s(), 0.0
        self._stopped = threading.Event()

    def start(self) -> None:
        """Look at the clock until `stop`; without it, time passes as far as `now_s` is called."""
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
