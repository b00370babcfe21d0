"""Proofs of the books."""

from __future__ import annotations

from headrace_billing import dead_letters, replay
from headrace_billing.desk import Desk
from headrace_billing.metrics import BillingMetrics
from headrace_billing.reconcile import LogReader, reconcile
from headrace_common.clock import Clock
from headrace_common.rpc import Call
from headrace_contracts.billing.v1 import billing_pb2 as pb


class BooksService:
    """Servicer of `headrace.billing.v1.Books`. Changes nothing."""

    def __init__(self, desk: Desk, log: LogReader, metrics: BillingMetrics, clock: Clock) -> None:
        self._desk = desk
        self._log = log
        self._metrics, self._clock = metrics, clock

    async def Replay(self, _request: pb.ReplayRequest, _call: Call) -> pb.ReplayResponse:  # noqa: N802 - contract name
        """Book every event again into an empty database and compare."""
        return await replay.replay(self._desk)

    async def Reconcile(self, _request: pb.ReconcileRequest, _call: Call) -> pb.ReconcileResponse:  # noqa: N802 - contract name
        """Compare the log and the workers' counts with the books."""
        answer = await reconcile(self._desk, self._log)
        self._metrics.reconciled(answer, self._clock.unix_s())
        return answer

    async def ListDeadLetters(  # noqa: N802 - contract name
        self, request: pb.ListDeadLettersRequest, _call: Call
    ) -> pb.ListDeadLettersResponse:
        """What could never be booked, newest first."""
        return await self._desk.read(lambda it: dead_letters.list_dead_letters(it, request.limit))
