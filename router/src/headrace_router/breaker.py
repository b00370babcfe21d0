"""Pure: replicas that fail one request after another get none for a while.

::

    CLOSED --failures in a row, or most of the last ones--> OPEN --time is over--> HALF OPEN
       ^                                                     ^                        | one probe
       '---------------- the probe's first token ------------'--- the probe fails ----'

The time doubles with each failed probe, up to a bound. A probe that ends without a verdict (its
client left) makes place for another. Nygard 2007, "Release It!".

Requests of other routers count like the own ones, probes too, as far as their news arrive: a
replica that fails is found by all routers together, and one probe serves all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headrace_common.clock import Clock
from headrace_common.kv_index import ReplicaKey
from headrace_router.load_guard import LoadGuard

OPEN, HALF_OPEN, CLOSED = "open", "half_open", "closed"


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When a breaker opens, and for how long. Seconds."""

    failures_in_a_row: int = 3
    # Of the last outcomes, once there are enough of them.
    failure_ratio: float = 0.5
    num_outcomes: int = 10
    first_open_s: float = 1.0
    longest_open_s: float = 30.0


@dataclass(slots=True)
class _Breaker:
    outcomes: deque[bool]
    in_a_row: int = 0
    # Monotonic time up to which it is open; None = closed.
    open_until_s: float | None = None
    open_s: float = 0.0
    probe: LoadGuard | None = None


class Breakers:
    """A breaker per replica; a `BookingListener` of all routers. Belongs to one event loop.

    Args:
        clock: time.
        limits: when they open.
        on_change: told of each new state.
    """

    def __init__(
        self,
        clock: Clock,
        limits: BreakerLimits | None = None,
        on_change: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._clock, self._limits = clock, limits or BreakerLimits()
        self._on_change = on_change
        self._breakers: dict[ReplicaKey, _Breaker] = {}
        self._open: set[ReplicaKey] = set()

    @property
    def num_open(self) -> int:
        """Replicas that get no requests, or one at a time."""
        return len(self._open)

    def broken(self, now_s: float) -> frozenset[ReplicaKey]:
        """Return the replicas that may not be picked now; usually none."""
        if not self._open:
            return _NONE
        return frozenset(key for key in self._open if not self._may_probe(key, now_s))

    def failed(self, guard: LoadGuard) -> None:
        """A request failed on its replica."""
        key, now_s = guard.replica, self._clock.now_s()
        breaker = self._breakers.get(key)
        if breaker is None:
            breaker = _Breaker(deque(maxlen=self._limits.num_outcomes))
            self._breakers[key] = breaker
        if breaker.open_until_s is None:
            breaker.outcomes.append(False)
            breaker.in_a_row += 1
            if self._is_bad(breaker):
                self._trip(key, breaker, self._limits.first_open_s, now_s)
        elif breaker.probe is guard:
            self._trip(key, breaker, min(2 * breaker.open_s, self._limits.longest_open_s), now_s)

    def booked(self, guard: LoadGuard, chain: Sequence[int]) -> None:
        """The first request to an open breaker whose time is over is its probe."""
        key = guard.replica
        if key in self._open and self._may_probe(key, self._clock.now_s()):
            self._breakers[key].probe = guard
            self._on_change(HALF_OPEN)

    def started(self, guard: LoadGuard) -> None:
        """A first token: the replica works."""
        breaker = self._breakers.get(guard.replica)
        if breaker is None:
            return
        if breaker.open_until_s is None:
            breaker.outcomes.append(True)
            breaker.in_a_row = 0
        elif breaker.probe is guard:
            del self._breakers[guard.replica]
            self._open.discard(guard.replica)
            self._on_change(CLOSED)

    def released(self, guard: LoadGuard) -> None:
        """A probe that ends without a verdict makes place for another."""
        breaker = self._breakers.get(guard.replica)
        if breaker is not None and breaker.probe is guard:
            breaker.probe = None

    def keep_only(self, keys: Iterable[ReplicaKey]) -> None:
        """Forget replicas that are gone."""
        known = set(keys)
        self._breakers = {key: one for key, one in self._breakers.items() if key in known}
        self._open &= known

    def _is_bad(self, breaker: _Breaker) -> bool:
        outcomes, limits = breaker.outcomes, self._limits
        is_full = len(outcomes) == limits.num_outcomes
        ratio = outcomes.count(False) / len(outcomes)
        return breaker.in_a_row >= limits.failures_in_a_row or (
            is_full and ratio >= limits.failure_ratio
        )

    def _trip(self, key: ReplicaKey, breaker: _Breaker, open_s: float, now_s: float) -> None:
        breaker.open_s, breaker.open_until_s, breaker.probe = open_s, now_s + open_s, None
        breaker.outcomes.clear()
        self._open.add(key)
        self._on_change(OPEN)

    def _may_probe(self, key: ReplicaKey, now_s: float) -> bool:
        breaker = self._breakers[key]
        is_over = breaker.open_until_s is not None and now_s >= breaker.open_until_s
        return is_over and breaker.probe is None


_NONE: frozenset[ReplicaKey] = frozenset()
