"""Pure: gathers the replicas of a model at one moment, and computes anew only what has changed.

Between two decisions one or two replicas of a large fleet report or get a booking. What follows
from a report and the bookings (load, filter) is kept per replica until one of them changes; what
follows from the peers too (seconds per token, per step) is a few multiplications each time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headrace_common.kv_index import ReplicaKey
from headrace_contracts.worker.v1.worker_pb2 import LoadReport
from headrace_router.breaker import Breakers
from headrace_router.decode_prediction import DecodePredictor, StepTime
from headrace_router.filters import broken as broken_filter
from headrace_router.filters import room
from headrace_router.filters.unavailable import unavailable
from headrace_router.fleet_view import FleetView, ReplicaView
from headrace_router.load_guard import Load, LoadBook
from headrace_router.prediction import PrefillPredictor
from headrace_router.replicas import Replica, ReplicaTable

# A replica that reports works; beyond so long without a report nothing is presumed.
_MAX_PROJECTED_S = 0.5


@dataclass(slots=True)
class _Standing:
    """What was computed for one replica, and from what."""

    report: LoadReport
    # Its bookings; see `LoadBook.revision`.
    account: object
    revision: int
    table_version: int
    is_fresh: bool
    load: Load
    filtered_by: str
    view: ReplicaView | None = None


class Gatherer:
    """Makes fleet views.

    Args:
        table: the replicas.
        loads: load and blocks in flight.
        predictor: seconds of prefill.
        decode: seconds of decode.
        breakers: which replicas fail; None = nobody looks.
    """

    def __init__(
        self,
        table: ReplicaTable,
        loads: LoadBook,
        predictor: PrefillPredictor,
        decode: DecodePredictor,
        breakers: Breakers | None = None,
    ) -> None:
        self._table, self._loads, self._breakers = table, loads, breakers
        self._predictor, self._decode = predictor, decode
        self._standings: dict[ReplicaKey, _Standing] = {}
        self._tidied_version = -1

    def view(self, model: str, now_s: float) -> FleetView:
        """Gather what does not depend on the request."""
        self._tidy()
        serving = self._table.serving(model)
        keys = [replica.key for replica in serving]
        _, times = self._predictor.token_times_s(keys)
        step = self._decode.usual_step(keys)
        output_tokens = self._decode.output_tokens(model)
        replicas = [
            self._view(replica, token_s, step, now_s)
            for replica, token_s in zip(serving, times, strict=True)
        ]
        if self._breakers is not None and (broken := self._breakers.broken(now_s)):
            replicas = [_unless_broken(one, broken) for one in replicas]
        return FleetView(model, now_s, self._table.version, step, output_tokens, replicas)

    def mend(self, view: FleetView, key: ReplicaKey) -> None:
        """Look again at one replica, after a booking there."""
        for idx, one in enumerate(view.replicas):
            if one.replica.key == key:
                mended = self._view(one.replica, one.token_s, view.usual_step, view.now_s)
                broken = self._breakers and self._breakers.broken(view.now_s)
                view.replicas[idx] = _unless_broken(mended, broken) if broken else mended

    def _view(
        self, replica: Replica, token_s: float, usual_step: StepTime, now_s: float
    ) -> ReplicaView:
        standing = self._standing(replica, now_s)
        load = standing.load
        base_s, slope_s = self._decode.step(replica.key, usual_step)
        step_s = base_s + slope_s * (load.num_requests + 1)
        view = standing.view
        backlog_s = load.backlog_tokens * token_s
        if backlog_s:
            backlog_s = max(0.0, backlog_s - _done_since_s(replica, token_s, now_s))
        if (
            view is None
            or view.token_s != token_s
            or view.step_s != step_s
            or view.backlog_s != backlog_s
        ):
            view = ReplicaView(
                replica, standing.filtered_by, load, token_s, backlog_s, step_s, slope_s
            )
            standing.view = view
        return view

    def _standing(self, replica: Replica, now_s: float) -> _Standing:
        """Return what follows from a replica's report and bookings."""
        known = self._standings.get(replica.key)
        account, revision = self._loads.revision(replica.key)
        version, is_fresh = self._table.version, replica.is_fresh(now_s)
        if (
            known is not None
            and known.report is replica.report
            and known.account is account
            and known.revision == revision
            and known.table_version == version
            and known.is_fresh == is_fresh
        ):
            return known
        load = self._loads.load(replica.key, replica.report if is_fresh else None)
        filtered_by = unavailable(replica, now_s) or room.reason(replica, load.num_requests)
        fresh = _Standing(replica.report, account, revision, version, is_fresh, load, filtered_by)
        self._standings[replica.key] = fresh
        return fresh

    def _tidy(self) -> None:
        """Forget replicas that are gone."""
        if self._tidied_version != self._table.version:
            self._tidied_version = self._table.version
            known = {replica.key for replica in self._table.all()}
            self._standings = {key: one for key, one in self._standings.items() if key in known}


def _done_since_s(replica: Replica, token_s: float, now_s: float) -> float:
    """Say how much of what a replica reported as queued it has computed since. Seconds."""
    queued_s = replica.report.queued_prefill_tokens * token_s
    return min(queued_s, max(replica.report_age_s(now_s), 0.0), _MAX_PROJECTED_S)


def _unless_broken(one: ReplicaView, broken: frozenset[ReplicaKey]) -> ReplicaView:
    found = one.filtered_by or broken_filter.reason(one.replica.key, broken)
    return one if found == one.filtered_by else replace(one, filtered_by=found)
