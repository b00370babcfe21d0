"""Pure: the requests of one model that wait for a replica.

Order: class of service, then the tenant served least, then the policy's urgency. The queue is
bounded; when it is full, a newcomer takes the place of the newest request of a lower class, or of
the tenant with the most waiting requests, and is refused if it is of that kind itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

from headrace_common.errors import QueueFull
from headrace_router.candidate import Query
from headrace_router.fairness import VirtualCounters
from headrace_router.pick import Choice

# Requests looked at per release.
SCAN_LIMIT = 48


@dataclass(eq=False, slots=True)
class Waiting:
    """One request in the queue."""

    query: Query
    arrived_s: float
    # Monotonic time at which it is given up.
    deadline_s: float
    # Set by the queue's owner when the request leaves: how it left.
    on_leave: Callable[[Choice | Exception], None] = field(repr=False)

    def waited_s(self, now_s: float) -> float:
        """Time spent here."""
        return now_s - self.arrived_s


@dataclass(frozen=True, slots=True)
class Release:
    """A request that may go now, and where."""

    waiting: Waiting
    choice: Choice


class ModelQueue:
    """Waiting requests of one model.

    Args:
        counters: what tenants were given.
        max_waiting: bound on the length.
    """

    def __init__(self, counters: VirtualCounters, max_waiting: int) -> None:
        self._counters, self._max_waiting = counters, max_waiting
        # class of service -> tenant -> requests, oldest first
        self._classes: dict[int, dict[str, dict[Waiting, None]]] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def add(self, one: Waiting, retry_after_s: float) -> Waiting | None:
        """Put a request in.

        Returns:
            The request that lost its place, if any; it is out of the queue.

        Raises:
            QueueFull: there is no place for this one.
        """
        victim = None
        if self._num_waiting >= self._max_waiting:
            victim = self._victim(one)
            if victim is None:
                raise QueueFull(
                    "Too many requests wait for this model. Try again later.",
                    retry_after_s=retry_after_s,
                )
            self.remove(victim)
        tenants = self._classes.setdefault(one.query.priority, {})
        tenant_id = one.query.tenant_id
        if tenant_id not in tenants:
            self._counters.arrive(tenant_id, tenants.keys())
            tenants[tenant_id] = {}
        tenants[tenant_id][one] = None
        self._num_waiting += 1
        return victim

    def remove(self, one: Waiting) -> bool:
        """Take a request out; tell whether it was in."""
        tenants = self._classes.get(one.query.priority, {})
        waiting = tenants.get(one.query.tenant_id, {})
        if one not in waiting:
            return False
        del waiting[one]
        if not waiting:
            del tenants[one.query.tenant_id]
        self._num_waiting -= 1
        return True

    def expired(self, now_s: float) -> list[Waiting]:
        """Return the requests whose time is over. They stay in."""
        return [one for one in self if one.deadline_s <= now_s]

    def next_deadline_s(self) -> float | None:
        """Return when the next request's time is over; None = nobody waits."""
        return min((one.deadline_s for one in self), default=None)

    def __iter__(self) -> Iterator[Waiting]:
        for tenants in self._classes.values():
            for waiting in tenants.values():
                yield from waiting

    def next_release(
        self, choose: Callable[[Waiting], Choice | None], now_s: float
    ) -> Release | None:
        """Return the request that goes next, if one may go. It stays in.

        Args:
            choose: the choice for a request, or None if it must wait.
            now_s: monotonic time.
        """
        budget = SCAN_LIMIT
        for priority in sorted(self._classes, reverse=True):
            tenants = self._classes[priority]
            ranks = self._counters.ranks(tenants.keys())
            for rank in sorted(set(ranks.values())):
                equals = [tenants[tenant] for tenant, one in ranks.items() if one == rank]
                best: Release | None = None
                best_urgency = float("inf")
                for one in _interleave(equals, budget):
                    budget -= 1
                    choice = choose(one)
                    if choice is None:
                        continue
                    urgency = choice.policy.urgency(choice.chosen, one.waited_s(now_s))
                    if urgency < best_urgency:
                        best, best_urgency = Release(one, choice), urgency
                if best is not None or budget <= 0:
                    return best
        return None

    def _victim(self, newcomer: Waiting) -> Waiting | None:
        occupied = [priority for priority, tenants in self._classes.items() if tenants]
        if not occupied:
            return None
        lowest = min(occupied)
        tenants = self._classes[lowest]
        largest = max(tenants, key=lambda tenant: len(tenants[tenant]))
        if lowest > newcomer.query.priority:
            return None
        if lowest == newcomer.query.priority:
            own = len(tenants.get(newcomer.query.tenant_id, ()))
            if len(tenants[largest]) <= own + 1:
                return None
        return next(reversed(tenants[largest]))


def _interleave(groups: list[dict[Waiting, None]], limit: int) -> list[Waiting]:
    """Take from each group in turn, oldest first."""
    taken: list[Waiting] = []
    for row in zip_longest(*groups):
        taken.extend(one for one in row if one is not None)
        if len(taken) >= limit:
            break
    return taken[:limit]
