"""Pure: load, counted in tokens from the moment of the decision.

Each decision makes one `LoadGuard`, and however the request ends, the guard gives its load back
exactly once. Between decisions and the workers' own reports::

    decided at t        counted by the guard
    report at > t + grace: the worker knows of the request; its own numbers count from there on

So load is never counted by half: neither other routers' requests nor those just decided are missed.
Other routers' bookings come over Redis (`bookings`) and are guards here too, marked as a peer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headrace_common.kv_index import ReplicaKey
from headrace_contracts.worker.v1.worker_pb2 import LoadReport
from headrace_router.in_flight import InFlightBlocks

# Decision to the worker's acceptance: a request younger than this at a report is not in it yet.
_ARRIVAL_GRACE_S = 0.1


class Load(NamedTuple):
    """Load of one replica."""

    # Prompt tokens that wait to be computed.
    backlog_tokens: int
    # Queued and running tokens.
    tokens: int
    num_requests: int
    # KV that requests hold; a block that several share counts once as far as the worker told.
    kv_tokens: int


@dataclass(slots=True)
class _Sum:
    """Totals over some guards."""

    backlog_tokens: int = 0
    tokens: int = 0
    num_requests: int = 0


class _Account:
    """The guards of one replica."""

    def __init__(self) -> None:
        self.all = _Sum()
        # Grows with each change.
        self.revision = 0
        # Decided too recently to be in the last report.
        self.unreported: dict[LoadGuard, None] = {}

    def note_report(self, now_s: float) -> None:
        limit_s = now_s - _ARRIVAL_GRACE_S
        for guard in [g for g in self.unreported if g.decided_at_s < limit_s]:
            del self.unreported[guard]
        self.revision += 1

    def load(self, report: LoadReport | None) -> Load:
        total = self.all
        if report is None:
            return Load(total.backlog_tokens, total.tokens, total.num_requests, total.tokens)
        backlog = report.queued_prefill_tokens
        tokens = report.queued_prefill_tokens + report.running_tokens
        num_told = num_requests = report.num_waiting + report.num_running
        kv_tokens = report.kv_used_tokens
        for guard in self.unreported:
            backlog += guard.backlog_tokens
            tokens += guard.tokens
            num_requests += 1
            kv_tokens += guard.backlog_tokens
        if 0 < num_told <= total.num_requests:
            # All its requests are known here. A worker learns what is cached of a prompt when it
            # starts it, and counts the whole prompt till then.
            backlog = min(backlog, total.backlog_tokens)
        num_requests = max(num_requests, total.num_requests)
        return Load(backlog, max(tokens, total.tokens), num_requests, kv_tokens)


# Of a replica without requests of this router. Never changed.
_IDLE = _Account()


class LoadGuard:
    """One request's load on one replica; see the module."""

    __slots__ = (
        "_book",
        "_entry_id",
        "_is_started",
        "_tied",
        "backlog_tokens",
        "decided_at_s",
        "is_peers",
        "replica",
        "tokens",
    )

    def __init__(
        self, book: LoadBook, replica: ReplicaKey, backlog_tokens: int, tokens: int, now_s: float
    ) -> None:
        self._book: LoadBook | None = book
        self._entry_id: int | None = None
        self._is_started = self.is_peers = False
        self._tied: LoadGuard | None = None
        self.replica, self.decided_at_s = replica, now_s
        self.backlog_tokens, self.tokens = backlog_tokens, tokens

    @property
    def is_released(self) -> bool:
        """Whether the load was given back."""
        return self._book is None

    def hold_blocks(self, entry_id: int) -> None:
        """Tie an in-flight entry to this guard's life."""
        self._entry_id = entry_id

    def tie(self, other: LoadGuard) -> None:
        """Give *other* back with this one's first token, or with its end: a prefill elsewhere."""
        self._tied = other

    def first_token(self, now_s: float) -> None:
        """The prompt is computed. Idempotent; nothing happens after the release."""
        if self._book is None or self._is_started:
            return
        self._is_started = True
        if self._tied is not None:
            self._tied.release()
        if self.backlog_tokens:
            self._book.change(self, backlog_tokens=-self.backlog_tokens, tokens=0)
        if self._entry_id is not None:
            self._book.in_flight.confirm(self._entry_id, now_s)
        self._book.tell_started(self)

    def add_output(self, num_tokens: int) -> None:
        """Count tokens that were generated since the last call."""
        if self._book is not None:
            self._book.change(self, backlog_tokens=0, tokens=num_tokens)

    def release(self) -> bool:
        """Give the load back; tell whether this call did it."""
        book, self._book = self._book, None
        if book is None:
            return False
        book.give_back(self)
        if self._tied is not None:
            self._tied.release()
        if self._entry_id is not None:
            book.in_flight.remove(self._entry_id)
        return True


class BookingListener(Protocol):
    """Is told of bookings, in order. Must return at once."""

    def booked(self, guard: LoadGuard, chain: Sequence[int]) -> None:
        """A request was sent to a replica."""
        ...

    def started(self, guard: LoadGuard) -> None:
        """Its prompt is computed. May be left out if the request ends before."""
        ...

    def released(self, guard: LoadGuard) -> None:
        """It is over."""
        ...


class LoadBook:
    """Load of all replicas, as this router knows it.

    Args:
        in_flight: where the blocks of requests under way are noted.
    """

    def __init__(self, in_flight: InFlightBlocks) -> None:
        self.in_flight = in_flight
        self._accounts: dict[ReplicaKey, _Account] = {}
        self._listeners: list[BookingListener] = []
        # Those of them that are told of peers' bookings too.
        self._wide_listeners: list[BookingListener] = []
        self._num_peers = 0

    def listen(self, listener: BookingListener, *, to_peers: bool = False) -> None:
        """Tell *listener* of every own booking from now on; *to_peers*: of those of peers too."""
        self._listeners.append(listener)
        if to_peers:
            self._wide_listeners.append(listener)

    def book(
        self,
        replica: ReplicaKey,
        chain: Sequence[int],
        *,
        uncached_tokens: int,
        prompt_tokens: int,
        now_s: float,
        of_peer: bool = False,
    ) -> LoadGuard:
        """Count a request on *replica* from now on; *of_peer* tells that another router sent it."""
        guard = LoadGuard(self, replica, uncached_tokens, prompt_tokens, now_s)
        guard.is_peers = of_peer
        account = self._accounts.setdefault(replica, _Account())
        account.revision += 1
        account.all.num_requests += 1
        account.all.backlog_tokens += uncached_tokens
        account.all.tokens += prompt_tokens
        account.unreported[guard] = None
        guard.hold_blocks(self.in_flight.add(replica, chain, now_s))
        self._num_peers += of_peer
        for listener in self._told_of(guard):
            listener.booked(guard, chain)
        return guard

    def load(self, replica: ReplicaKey, report: LoadReport | None) -> Load:
        """Return the load of a replica.

        Args:
            replica: which one.
            report: its last report; None = there is no fresh one.
        """
        account = self._accounts.get(replica, _IDLE)
        return account.load(report)

    def revision(self, replica: ReplicaKey) -> tuple[object, int]:
        """Return what differs from all that came before once `load` may say something else.

        The same report is presumed.
        """
        account = self._accounts.get(replica, _IDLE)
        return account, account.revision

    def note_report(self, replica: ReplicaKey, now_s: float) -> None:
        """Record that a report of *replica* has just come."""
        account = self._accounts.get(replica)
        if account is not None:
            account.note_report(now_s)

    def num_requests(self) -> int:
        """Count this router's requests that hold load."""
        held = sum(account.all.num_requests for account in self._accounts.values())
        return held - self._num_peers

    def tell_started(self, guard: LoadGuard) -> None:
        """Pass a first token on. Called by guards only."""
        for listener in self._told_of(guard):
            listener.started(guard)

    def change(self, guard: LoadGuard, *, backlog_tokens: int, tokens: int) -> None:
        """Change a live guard's numbers. Called by guards only."""
        guard.backlog_tokens += backlog_tokens
        guard.tokens += tokens
        account = self._accounts[guard.replica]
        account.revision += 1
        total = account.all
        total.backlog_tokens += backlog_tokens
        total.tokens += tokens

    def give_back(self, guard: LoadGuard) -> None:
        """Take a guard out of the totals. Called by guards only."""
        account = self._accounts[guard.replica]
        account.revision += 1
        account.all.num_requests -= 1
        account.all.backlog_tokens -= guard.backlog_tokens
        account.all.tokens -= guard.tokens
        account.unreported.pop(guard, None)
        if not account.all.num_requests:
            del self._accounts[guard.replica]
        self._num_peers -= guard.is_peers
        for listener in self._told_of(guard):
            listener.released(guard)

    def _told_of(self, guard: LoadGuard) -> list[BookingListener]:
        return self._wide_listeners if guard.is_peers else self._listeners
