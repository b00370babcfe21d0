"""Pure: the requests of one model that wait for a replica.

Order: class of service, then the tenant served least, then requests whose own goal for the first
token is about to be missed (earliest first), then the policy's urgency. A goal that can no longer
be met presses no more, or one late request would make all others late. Age lifts a request into
the next higher class, so that no class starves. Between tenants age counts from when the tenant
last had its turn in that class, for both, or the many of a tenant that floods would grow old and
pass by the few of all others.

The queue is bounded; when it is full, a newcomer takes the place of the newest request of a lower
class, or of the tenant with the most waiting requests, and is refused if it is of that kind itself.
Who would be given up in the end, as the queue moves now, is told early: the client may still go
elsewhere, and nobody is held up by work that comes too late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

from headrace_common.errors import HeadraceError, QueueFull
from headrace_router.candidate import HIGH, Query
from headrace_router.drain_rate import DrainRate
from headrace_router.fairness import VirtualCounters
from headrace_router.pick import Choice
from headrace_router.policy_file import QueueSection

# Requests looked at per release.
SCAN_LIMIT = 48
# A queue moves that much faster than it did, before somebody is told that his time is over.
_HOPE = 1.25
_LOOK_S = 1.0
# No goal presses, the goal, the policy's urgency; the least goes first.
_Order = tuple[bool, float, float]


@dataclass(eq=False, slots=True)
class Waiting:
    """One request in the queue."""

    query: Query
    arrived_s: float
    # Monotonic time at which it is given up.
    deadline_s: float
    # Set by the queue's owner when the request leaves: how it left.
    on_leave: Callable[[Choice | HeadraceError], None] = field(repr=False)
    # Class of service it has risen to by age.
    priority: int = 0
    # What is cached of it where, in the order of the view it was looked up for; see `PickDesk`.
    hits: list[int] = field(default_factory=list)
    hits_version: int = -1
    hits_at_s: float = 0.0
    # Monotonic time before which it does not go.
    gather_until_s: float = 0.0

    def __post_init__(self) -> None:
        self.priority = self.query.priority

    def waited_s(self, now_s: float) -> float:
        """Time spent here."""
        return now_s - self.arrived_s


@dataclass(slots=True)
class _Line:
    """What one tenant has waiting in one class, oldest first."""

    requests: dict[Waiting, None] = field(default_factory=dict)
    # When one of them went last. Monotonic.
    served_s: float = float("-inf")


@dataclass(frozen=True, slots=True)
class Release:
    """A request that may go now, and where."""

    waiting: Waiting
    choice: Choice


class ModelQueue:
    """Waiting requests of one model.

    Args:
        model: served name.
        counters: what tenants were given.
        rules: bounds, age and goals.
    """

    def __init__(self, model: str, counters: VirtualCounters, rules: QueueSection) -> None:
        self.model, self._counters, self._rules = model, counters, rules
        # class of service -> tenant -> requests
        self._classes: dict[int, dict[str, _Line]] = {}
        self._num_waiting = 0
        self._rate: DrainRate | None = None
        self._looked_s = 0.0

    def use(self, rules: QueueSection) -> None:
        """Go on by other rules. Requests beyond a smaller bound stay."""
        self._rules = rules

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
        if self._num_waiting >= self._rules.max_waiting_per_model:
            victim = self._victim(one)
            if victim is None:
                raise QueueFull(
                    "Too many requests wait for this model. Try again later.",
                    retry_after_s=retry_after_s,
                )
            self.remove(victim)
        self._insert(one)
        self._num_waiting += 1
        if self._rate is None:
            self._rate = DrainRate(one.arrived_s)
        return victim

    def remove(self, one: Waiting) -> bool:
        """Take a request out; tell whether it was in."""
        line = self._line_of(one)
        if line is None or one not in line.requests:
            return False
        self._take_out(one, line)
        self._num_waiting -= 1
        return True

    def note_turn(self, one: Waiting, now_s: float) -> None:
        """A waiting request goes to its replica: its tenant has had a turn."""
        if (line := self._line_of(one)) is not None:
            line.served_s = now_s
        if self._rate is not None:
            self._rate.note(now_s)

    def others_wait(self, query: Query) -> bool:
        """Whether another tenant waits, in the class of a newcomer or a higher one."""
        return any(
            tenant != query.tenant_id
            for priority, tenants in self._classes.items()
            if priority >= query.priority
            for tenant in tenants
        )

    def expired(self, now_s: float) -> list[Waiting]:
        """Return the requests whose time is over. They stay in."""
        return [one for one in self if one.deadline_s <= now_s]

    def hopeless(self, now_s: float) -> list[Waiting]:
        """Return those who would be given up in the end, by the rate of late. They stay in.

        Looks once a second. Requests that lost their replica are left: what they have is lost then.
        """
        rate = None if self._rate is None else self._rate.per_s(now_s)
        if rate is None or now_s - self._looked_s < _LOOK_S:
            return []
        self._looked_s = now_s
        found, num_ahead = [], 0
        for _, tenants in sorted(self._classes.items(), reverse=True):
            lines = [line.requests for line in tenants.values()]
            for one in _interleave(lines, self._num_waiting):
                num_served = (one.deadline_s - now_s) * rate * _HOPE
                if num_ahead < num_served or one.query.excluded:
                    num_ahead += 1
                else:
                    found.append(one)
        return found

    def next_deadline_s(self) -> float | None:
        """Return when the next request's time is over; None = nobody waits."""
        return min((one.deadline_s for one in self), default=None)

    def __iter__(self) -> Iterator[Waiting]:
        for tenants in self._classes.values():
            for line in tenants.values():
                yield from line.requests

    def next_release(
        self, choose: Callable[[Waiting], Choice | None], now_s: float
    ) -> Release | None:
        """Return the request that goes next, if one may go. It stays in.

        Args:
            choose: the choice for a request, or None if it must wait.
            now_s: monotonic time.
        """
        self._promote(now_s)
        budget = SCAN_LIMIT
        for priority in sorted(self._classes, reverse=True):
            tenants = self._classes[priority]
            ranks = self._counters.ranks(tenants.keys())
            for rank in sorted(set(ranks.values())):
                equals = [tenants[tenant].requests for tenant, one in ranks.items() if one == rank]
                scanned = _interleave(equals, budget)
                budget -= len(scanned)
                best = self._best(scanned, choose, now_s)
                if best is not None or budget <= 0:
                    return best
        return None

    def _best(
        self, scanned: list[Waiting], choose: Callable[[Waiting], Choice | None], now_s: float
    ) -> Release | None:
        # The first of each tenant by its own age; of these by how long the tenant has had nothing.
        firsts: dict[str, tuple[_Order, Release]] = {}
        for one in scanned:
            choice = choose(one)
            if choice is None:
                continue
            order = self._order(one, choice, one.waited_s(now_s), now_s)
            known = firsts.get(one.query.tenant_id)
            if known is None or order < known[0]:
                firsts[one.query.tenant_id] = order, Release(one, choice)
        best: Release | None = None
        best_order: _Order = (True, 0.0, 0.0)
        for _, release in firsts.values():
            one = release.waiting
            line = self._line_of(one)
            served_s = one.arrived_s if line is None else max(line.served_s, one.arrived_s)
            order = self._order(one, release.choice, now_s - served_s, now_s)
            if best is None or order < best_order:
                best, best_order = release, order
        return best

    def _order(self, one: Waiting, choice: Choice, waited_s: float, now_s: float) -> _Order:
        goal_s = self._pressing_goal_s(one, choice, now_s)
        urgency = choice.policy.urgency(choice.chosen, waited_s)
        return goal_s is None, goal_s or 0.0, urgency

    def _pressing_goal_s(self, one: Waiting, choice: Choice, now_s: float) -> float | None:
        """Return when the first token is due, if that is soon and can still be met."""
        if not one.query.ttft_goal_s:
            return None
        goal_s = one.arrived_s + one.query.ttft_goal_s
        spare_s = goal_s - now_s - choice.chosen.predicted_ttft_s
        return goal_s if 0 <= spare_s <= self._rules.goal_window_s else None

    def _promote(self, now_s: float) -> None:
        """Lift what has waited long into the next higher class, one class per waiting period."""
        for priority in sorted(self._classes):
            if priority >= HIGH:
                continue
            for line in list(self._classes[priority].values()):
                if now_s - line.served_s < self._rules.promote_after_s:
                    continue
                for one in list(line.requests):
                    steps = priority + 1 - one.query.priority
                    if one.waited_s(now_s) < steps * self._rules.promote_after_s:
                        # Oldest first: the rest is younger.
                        break
                    self._take_out(one, line)
                    one.priority = priority + 1
                    self._insert(one)

    def _line_of(self, one: Waiting) -> _Line | None:
        return self._classes.get(one.priority, {}).get(one.query.tenant_id)

    def _insert(self, one: Waiting) -> None:
        tenants = self._classes.setdefault(one.priority, {})
        tenant_id = one.query.tenant_id
        if tenant_id not in tenants:
            self._counters.arrive(tenant_id, tenants.keys())
            tenants[tenant_id] = _Line()
        tenants[tenant_id].requests[one] = None

    def _take_out(self, one: Waiting, line: _Line) -> None:
        del line.requests[one]
        if not line.requests:
            del self._classes[one.priority][one.query.tenant_id]

    def _victim(self, newcomer: Waiting) -> Waiting | None:
        occupied = [priority for priority, tenants in self._classes.items() if tenants]
        if not occupied:
            return None
        lowest = min(occupied)
        tenants = self._classes[lowest]
        waiting = {tenant: len(line.requests) for tenant, line in tenants.items()}
        largest = max(waiting, key=lambda tenant: waiting[tenant])
        if lowest > newcomer.query.priority:
            return None
        if lowest == newcomer.query.priority:
            own = waiting.get(newcomer.query.tenant_id, 0)
            if waiting[largest] <= own + 1:
                return None
        return next(reversed(tenants[largest].requests))


def _interleave(groups: list[dict[Waiting, None]], limit: int) -> list[Waiting]:
    """Take from each group in turn, oldest first."""
    taken: list[Waiting] = []
    for row in zip_longest(*groups):
        taken.extend(one for one in row if one is not None)
        if len(taken) >= limit:
            break
    return taken[:limit]
