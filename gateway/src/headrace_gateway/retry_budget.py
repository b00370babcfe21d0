"""Pure: how often and how soon a request is tried again before its first token.

Retries are paid out of a bucket that requests fill, a fifth of a token each, so that a fleet in
trouble gets at most a fifth more load; a trickle by time keeps a quiet gateway able to retry. Waits
are drawn evenly between nothing and a bound that doubles ("full jitter").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace_common.clock import Clock


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """Bounds. Seconds; retries per request and per second."""

    ratio: float = 0.2
    floor_per_s: float = 1.0
    # Most that can be saved up: what one lost worker may have had in its queue.
    burst: float = 100.0
    first_wait_s: float = 0.02
    longest_wait_s: float = 1.0


class RetryBudget:
    """The bucket of one gateway. Belongs to one event loop.

    Args:
        limits: see there.
        clock: time.
        uniform: draws from [0, 1).
    """

    def __init__(self, limits: RetryLimits, clock: Clock, uniform: Callable[[], float]) -> None:
        self._limits, self._clock, self._uniform = limits, clock, uniform
        self._tokens, self._filled_s = limits.burst, clock.now_s()

    def add_request(self) -> None:
        """A request came: it pays for a part of a retry."""
        self._add(self._limits.ratio)

    def try_take(self) -> bool:
        """Pay for a retry; False = there must not be one now."""
        now_s = self._clock.now_s()
        self._add((now_s - self._filled_s) * self._limits.floor_per_s)
        self._filled_s = now_s
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def wait_s(self, num_failures: int) -> float:
        """Return how long to wait after so many failures, at least one."""
        bound_s = self._limits.first_wait_s * 2.0 ** min(num_failures - 1, 20)
        return self._uniform() * min(bound_s, self._limits.longest_wait_s)

    def _add(self, tokens: float) -> None:
        self._tokens = min(self._limits.burst, self._tokens + tokens)
