"""A clock that moves only when told."""

from __future__ import annotations


class FakeClock:
    """Both clocks of `headrace_common.clock.Clock`, moved together by `advance`."""

    def __init__(self, now_s: float = 1000.0, unix_s: float = 1_800_000_000.0) -> None:
        self._now_s, self._unix_s = now_s, unix_s

    def now_s(self) -> float:
        """Monotonic seconds."""
        return self._now_s

    def unix_s(self) -> float:
        """Wall seconds."""
        return self._unix_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds
        self._unix_s += seconds
