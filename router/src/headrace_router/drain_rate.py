"""Pure: how fast a queue moves. Told only of one that has moved steadily for some seconds."""

from __future__ import annotations

from collections import deque

WINDOW_S = 8.0
# Fewer turns in a window say nothing of the next.
MIN_TURNS = 8


class DrainRate:
    """Turns a second in the window that ends now.

    A queue that forms behind idle replicas moves fast at first, so that the rate is rather told too
    high than too low.
    """

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._turns_s: deque[float] = deque()

    def note(self, now_s: float) -> None:
        """Somebody has had a turn."""
        self._turns_s.append(now_s)
        self._forget(now_s)

    def per_s(self, now_s: float) -> float | None:
        """Return the rate; None = not known."""
        self._forget(now_s)
        if now_s - self._began_s < WINDOW_S or len(self._turns_s) < MIN_TURNS:
            return None
        return len(self._turns_s) / WINDOW_S

    def _forget(self, now_s: float) -> None:
        while self._turns_s and self._turns_s[0] <= now_s - WINDOW_S:
            self._turns_s.popleft()
