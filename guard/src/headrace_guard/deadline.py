"""A bound on the time that one judgement may take."""

from __future__ import annotations

from headrace_common.clock import Clock


class OutOfTimeError(Exception):
    """The judgement could not be finished in its time."""


class Deadline:
    """A point in time that long work looks at between its steps.

    Args:
        clock: source of time; read from several threads.
        budget_s: most seconds from now.
        time_left_s: what the caller still waits; None = no bound of its own.
    """

    def __init__(self, clock: Clock, budget_s: float, time_left_s: float | None = None) -> None:
        self._clock = clock
        self.budget_s = budget_s if time_left_s is None else min(budget_s, time_left_s)
        self._at_s = clock.now_s() + self.budget_s

    def left_s(self) -> float:
        """Return what is left; 0 if the time is over."""
        return max(0.0, self._at_s - self._clock.now_s())

    def check(self) -> None:
        """Go on, or stop here.

        Raises:
            OutOfTimeError: the time is over.
        """
        if self._clock.now_s() >= self._at_s:
            raise OutOfTimeError
