"""Time as an argument: wall time for records, monotonic time for durations."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of time. Production passes `SystemClock`, tests a fake."""

    def now_s(self) -> float:
        """Monotonic seconds, for durations and deadlines inside one process."""
        ...

    def unix_s(self) -> float:
        """Wall time, Unix seconds, for records that leave the process."""
        ...


class SystemClock:
    """The machine's clocks."""

    # The functions themselves: a request asks thirty times.
    now_s = staticmethod(time.monotonic)
    unix_s = staticmethod(time.time)


def unix_us(clock: Clock) -> int:
    """Return the wall time in whole Unix microseconds, the unit of usage events."""
    return int(clock.unix_s() * 1_000_000)
