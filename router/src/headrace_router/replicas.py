"""Pure: the replica table, as the watchers of the workers fill it.

A replica's life, as the router sees it::

    (unknown) --Describe--> LOADING | READY | DRAINING | STUCK     what the worker says of itself
                                  |  ^
               stream breaks      v  | stream is back
                               unreachable                         whatever it last said

A worker that comes back with another incarnation is another replica at the same address.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from headrace_common.kv_index import ReplicaKey
from headrace_contracts.types.v1.types_pb2 import ReplicaRef
from headrace_contracts.worker.v1.worker_pb2 import (
    POOL_ROLE_UNSPECIFIED,
    WORKER_STATE_READY,
    WORKER_STATE_UNSPECIFIED,
    DescribeResponse,
    LoadReport,
    ModelCard,
    PoolRole,
    WorkerState,
)

# Reports come at least every 250 ms; eight missing ones mean that the worker is frozen.
MAX_REPORT_AGE_S = 2.0


@dataclass(slots=True)
class Replica:
    """What is known of the worker at one address."""

    address: str
    key: ReplicaKey
    state: WorkerState.ValueType = WORKER_STATE_UNSPECIFIED
    is_reachable: bool = False
    role: PoolRole.ValueType = POOL_ROLE_UNSPECIFIED
    cards: tuple[ModelCard, ...] = ()
    models: frozenset[str] = frozenset()
    report: LoadReport = field(default_factory=LoadReport)
    # Monotonic time of the last report; None = none since it can be reached.
    reported_at_s: float | None = None
    # No report came for too long since.
    is_silent: bool = False
    # The key as a message. Read only.
    ref: ReplicaRef = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.ref = self.key.to_ref()

    def report_age_s(self, now_s: float) -> float:
        """Age of the last load report; infinite without one."""
        return float("inf") if self.reported_at_s is None else now_s - self.reported_at_s

    def is_fresh(self, now_s: float) -> bool:
        """Whether the worker has reported lately."""
        return self.report_age_s(now_s) <= MAX_REPORT_AGE_S

    @property
    def is_heard(self) -> bool:
        """Whether it can be reached, has told its load since and goes on to: else no pick."""
        return self.is_reachable and self.reported_at_s is not None and not self.is_silent

    def is_ready(self, now_s: float) -> bool:
        """Whether it may get requests at all."""
        return self.is_reachable and self.state == WORKER_STATE_READY and self.is_fresh(now_s)


class ReplicaTable:
    """All replicas, by address. Belongs to one event loop."""

    def __init__(self) -> None:
        self._by_address: dict[str, Replica] = {}
        # Addresses of workers, seen there or not.
        self._expected: set[str] = set()
        # Those of them that were waited for in vain.
        self._given_up: set[str] = set()
        self._by_model: dict[str, list[Replica]] = {}
        self._listeners: list[Callable[[], None]] = []
        # Grows with each change but load.
        self.version = 0

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call *listener* after each change, load included."""
        self._listeners.append(listener)

    def expect(self, address: str) -> None:
        """Learn of an address at which a worker will be. Idempotent."""
        if address not in self._expected:
            self._expected.add(address)
            self._changed()

    def describe(self, address: str, described: DescribeResponse) -> None:
        """Take a worker's description of itself; it is reachable."""
        key = ReplicaKey.of(described.replica)
        old = self._by_address.get(address)
        replica = old if old is not None and old.key == key else Replica(address, key)
        self._by_address[address] = replica
        replica.state, replica.is_reachable = described.state, True
        replica.role = described.role
        replica.cards = tuple(described.models)
        replica.models = frozenset(card.model for card in described.models)
        if replica.cards:
            self._given_up.discard(address)
        self._changed()

    def report(self, address: str, report: LoadReport, now_s: float) -> bool:
        """Take a load report.

        Returns:
            False if the worker must be described anew: another incarnation, or it left LOADING.
        """
        replica = self._by_address.get(address)
        if replica is None or replica.key != ReplicaKey.of(report.replica):
            return False
        left_loading = report.state == WORKER_STATE_READY and not replica.cards
        is_news = report.state != replica.state or not replica.is_heard
        replica.state, replica.is_reachable = report.state, True
        replica.report, replica.reported_at_s, replica.is_silent = report, now_s, False
        if is_news:
            self._changed()
        else:
            self._notify()
        return not left_loading

    def lose(self, address: str) -> None:
        """Record that the worker cannot be reached. Idempotent."""
        replica = self._by_address.get(address)
        if replica is not None and replica.is_reachable:
            replica.is_reachable, replica.reported_at_s = False, None
            self._changed()

    def note_silent(self, now_s: float) -> None:
        """Tell of workers that have not reported lately as out of reach, until they report."""
        for replica in self.all():
            if replica.is_heard and not replica.is_fresh(now_s):
                replica.is_silent = True
                self._changed()

    def remove(self, address: str) -> None:
        """Forget an address. Idempotent."""
        if self._by_address.pop(address, None) is not None or address in self._expected:
            self._expected.discard(address)
            self._given_up.discard(address)
            self._changed()

    def all(self) -> list[Replica]:
        """Return every replica, by address."""
        return [replica for _, replica in sorted(self._by_address.items())]

    def serving(self, model: str) -> list[Replica]:
        """Return the replicas that serve *model*, whatever their state."""
        return self._by_model.get(model, [])

    def get(self, address: str) -> Replica | None:
        """Return the replica at *address*."""
        return self._by_address.get(address)

    def undescribed(self) -> set[str]:
        """Return the addresses whose workers have yet to say what they serve."""
        loading = {it.address for it in self._by_address.values() if not it.cards}
        return loading | (self._expected - self._by_address.keys())

    def give_up(self, address: str) -> bool:
        """Wait no more for what its worker may serve, until it says so; False = done before."""
        if address in self._given_up:
            return False
        self._given_up.add(address)
        self._changed()
        return True

    def has_undescribed_models(self) -> bool:
        """Whether a worker is waited for that may yet say that it serves an unknown model."""
        return not self.undescribed() <= self._given_up

    def _changed(self) -> None:
        self.version += 1
        by_model: dict[str, dict[ReplicaKey, Replica]] = {}
        for replica in self.all():
            for model in replica.models:
                # Two addresses of one worker are one replica: the reachable one counts.
                known = by_model.setdefault(model, {})
                if replica.is_reachable or replica.key not in known:
                    known[replica.key] = replica
        self._by_model = {model: list(known.values()) for model, known in by_model.items()}
        self._notify()

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()
