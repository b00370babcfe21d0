"""One simulated router: the production parts, driven by simulated events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import Final

from prometheus_client import CollectorRegistry

from headrace_common.kv_index import TIERS, ReplicaKey
from headrace_contracts.cache_index.v1.cache_index_pb2 import IndexDelta
from headrace_contracts.worker.v1.worker_pb2 import (
    WORKER_STATE_READY,
    DescribeResponse,
    LoadReport,
    ModelCard,
)
from headrace_router.decode_prediction import DecodePredictor
from headrace_router.desk import PickDesk
from headrace_router.in_flight import InFlightBlocks
from headrace_router.load_guard import LoadBook
from headrace_router.metrics import RouterMetrics
from headrace_router.mirror import PrefixMirror
from headrace_router.pick import Pipeline
from headrace_router.policy_file import PolicyFile
from headrace_router.prediction import PrefillPredictor
from headrace_router.replicas import ReplicaTable
from headrace_router.simulate.events import EventQueue

MODEL: Final = "simulated"
# As the dispatcher: passes over the queue are this far apart.
_MIN_PASS_S = 0.003


class SimulatedRouter:
    """Table, mirror, loads, predictors and desk, as `RouterApp` wires them.

    Args:
        events: time.
        keys: the replicas.
        policy_file: how to pick.
        seed: of tie-breaks.
    """

    def __init__(
        self,
        events: EventQueue,
        keys: Iterable[ReplicaKey],
        policy_file: PolicyFile,
        seed: int,
    ) -> None:
        self._events = events
        self.table, self.mirror = ReplicaTable(), PrefixMirror()
        self.loads = LoadBook(InFlightBlocks())
        self.predictor = PrefillPredictor(policy_file.pick.default_prefill_tokens_per_s)
        self.decode = DecodePredictor()
        self.num_resyncs = 0
        self._resyncing: set[ReplicaKey] = set()
        self._is_pass_due, self._last_pass_s = False, 0.0
        self.desk = PickDesk(
            Pipeline(self.table, self.mirror, self.loads, self.predictor, self.decode),
            self.loads,
            self.predictor,
            self.decode,
            policy_file,
            events,
            Random(seed),  # noqa: S311 - spreads load, guards nothing
            RouterMetrics(CollectorRegistry()),
        )
        self.desk.on_change(self._plan_pass)
        self.table.on_change(self.desk.notice_change)
        for key in keys:
            self.table.describe(
                key.worker_id,
                DescribeResponse(
                    replica=key.to_ref(), state=WORKER_STATE_READY, models=[ModelCard(model=MODEL)]
                ),
            )

    def take_report(self, key: ReplicaKey, report: LoadReport) -> None:
        """Take a load report, as `WorkerWatch` does."""
        now_s = self._events.now_s()
        self.loads.note_report(key, now_s)
        self.decode.observe(key, report)
        self.predictor.observe_report(key, report)
        self.table.report(key.worker_id, report, now_s)

    def take_delta(
        self,
        key: ReplicaKey,
        delta: IndexDelta,
        snapshot: Callable[[], tuple[int, list[int]]],
        resync_delay_s: float,
    ) -> None:
        """Apply a change of the index; after a gap the replica's blocks are read anew."""
        if key in self._resyncing or self.mirror.apply(delta):
            return
        self._resyncing.add(key)
        self._events.after(resync_delay_s, lambda: self._resync(key, snapshot))

    def _resync(self, key: ReplicaKey, snapshot: Callable[[], tuple[int, list[int]]]) -> None:
        self.num_resyncs += 1
        self._resyncing.discard(key)
        seq, hashes = snapshot()
        fresh = self.mirror.begin(MODEL, seq)
        self.mirror.add(fresh, TIERS[0], hashes)
        self.mirror.commit(key, fresh)
        while self.mirror.sweep_some(100_000):
            pass

    def _plan_pass(self) -> None:
        if not self._is_pass_due:
            self._is_pass_due = True
            self._events.at(self._last_pass_s + _MIN_PASS_S, self._pass)

    def _pass(self) -> None:
        self._is_pass_due, self._last_pass_s = False, self._events.now_s()
        self.desk.release_all()
        wait_s = self.desk.next_look_s()
        if wait_s is not None:
            self._events.after(wait_s, self._plan_pass)
