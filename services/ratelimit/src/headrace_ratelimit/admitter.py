"""The three calls, for callers that hand over a function instead of waiting.

request --plan--> Redis --decision--> answer
|                   ^
|--down-----> local share
'--UNSEEDED-> the ledger rebuilds the budgets, then once more
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from prometheus_client import Counter

from headrace_common.errors import HeadraceError
from headrace_common.lifecycle import cancel_and_wait
from headrace_common.limits.limiter import Amounts, Mode, Outcome
from headrace_common.limits.local_share import LocalShare
from headrace_common.limits.plans import Plan, Plans, amounts_of, check_id, check_lease_ms
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb
from headrace_ratelimit.batcher import Batcher, StoreDownError
from headrace_ratelimit.metrics import RateLimitMetrics
from headrace_ratelimit.rebuild import Rebuilder
from headrace_ratelimit.store import (
    Reply,
    admit_op,
    answer_of_reply,
    renew_op,
    settle_op,
    windows_of,
)

Answer = TypeVar("Answer")
# Called once with the answer or the error.
Done = Callable[[Answer | HeadraceError], None]
_Label = tuple[pb.AdmitResponse.Outcome.ValueType, pb.Dimension.ValueType, bool]
_ADMITTED: _Label = (pb.AdmitResponse.OUTCOME_ADMITTED, pb.DIMENSION_UNSPECIFIED, False)
_UNSEEDED = Outcome.UNSEEDED.value


class Admitter:
    """Admits by Redis, or by the local share while Redis is away. Belongs to one event loop.

    Args:
        batcher: the way to Redis.
        local: decides without it.
        rebuilder: brings budgets back from the ledger; None = there is no ledger to ask.
        metrics: see `RateLimitMetrics`.
        rebuild_timeout_s: longest wait for a rebuilding before the local share decides.
    """

    def __init__(
        self,
        batcher: Batcher,
        local: LocalShare,
        rebuilder: Rebuilder | None,
        metrics: RateLimitMetrics,
        rebuild_timeout_s: float,
    ) -> None:
        self._batcher, self._local, self._rebuilder = batcher, local, rebuilder
        self._metrics, self._rebuild_timeout_s = metrics, rebuild_timeout_s
        self._plans = Plans()
        self._counters: dict[_Label, Counter] = {}
        # Admitted by Redis and not counted yet: counted together at the end of the loop's turn.
        self._num_admitted = 0
        self._retries: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Stop waiting for the ledger."""
        await cancel_and_wait(*self._retries)

    def admit(self, request: pb.AdmitRequest, done: Done[pb.AdmitResponse]) -> None:
        """Decide over all limits of a request at once.

        Raises:
            InvalidRequest: the request is wrong; *done* is not called.
        """
        plan = self._plans.of(request)

        def on_reply(reply: Reply | HeadraceError) -> None:
            if isinstance(reply, StoreDownError):
                answer = self._local.admit(plan)
                if reply.may_have_run and answer.outcome != pb.AdmitResponse.OUTCOME_ADMITTED:
                    self._give_back(plan)
                self._finish(plan, answer, done)
            elif isinstance(reply, HeadraceError):
                done(reply)
            elif reply[0] == _UNSEEDED:
                self._retry_later(plan, reply, done)
            else:
                self._finish_decided(plan, reply, done)

        self._batcher.submit(admit_op(plan), on_reply)

    def settle(self, request: pb.SettleRequest, done: Done[pb.SettleResponse]) -> None:
        """Replace a reservation by what was used; without Redis, once it is back.

        Raises:
            InvalidRequest: the request is wrong; *done* is not called.
        """
        check_id("tenant_id", request.tenant_id)
        check_id("lease_id", request.lease_id)
        actual = amounts_of(request.actual)
        foreign = self._local.settle(request.tenant_id, request.lease_id, actual)

        def on_reply(reply: Reply | HeadraceError) -> None:
            if isinstance(reply, HeadraceError) and not isinstance(reply, StoreDownError):
                done(reply)
                return
            is_settled = isinstance(reply, StoreDownError) or reply == 1
            done(pb.SettleResponse(settled=is_settled or foreign is not None))

        op = settle_op(request.tenant_id, request.lease_id, actual, foreign or [])
        self._batcher.submit(op, on_reply, must_run=True)

    def renew(self, request: pb.RenewRequest, done: Done[pb.RenewResponse]) -> None:
        """Extend leases. Without Redis nothing is called unknown: nobody can tell.

        Raises:
            InvalidRequest: the request is wrong; *done* is not called.
        """
        check_id("tenant_id", request.tenant_id)
        for lease_id in request.lease_ids:
            check_id("lease_ids", lease_id)
        check_lease_ms(request.lease_ms)
        tenant_id, lease_us = request.tenant_id, request.lease_ms * 1000
        self._local.renew(tenant_id, list(request.lease_ids), lease_us)
        own = [i for i in request.lease_ids if self._local.owns(tenant_id, i)]
        lease_ids = [i for i in request.lease_ids if i not in own] if own else request.lease_ids

        def on_reply(reply: Reply | HeadraceError) -> None:
            if isinstance(reply, StoreDownError):
                done(pb.RenewResponse())
            elif isinstance(reply, HeadraceError):
                done(reply)
            else:
                # Redis does not know of those granted without it; their gateway may tell it.
                unknown = [lease_id.decode() for lease_id in reply] + own
                done(pb.RenewResponse(unknown_lease_ids=unknown))

        self._batcher.submit(renew_op(tenant_id, lease_ids, lease_us), on_reply)

    def _decide(self, plan: Plan, reply: Reply) -> pb.AdmitResponse:
        answer = answer_of_reply(plan.charges, reply, is_brief=plan.brief)
        if plan.mode is Mode.RESTORE:
            self._local.forget(plan.tenant_id, plan.lease_id)
        if plan.mode is not Mode.PEEK:
            left = answer.remaining if plan.brief else [it.remaining for it in answer.states]
            self._local.note(plan.tenant_id, plan.charges, left)
            if self._rebuilder is not None:
                self._rebuilder.note(plan)
        return answer

    def _give_back(self, plan: Plan) -> None:
        """Settle, once Redis is back, what it may have granted to somebody who was refused."""
        if plan.mode is Mode.NORMAL:
            op = settle_op(plan.tenant_id, plan.lease_id, Amounts(), [])
            self._batcher.submit(op, lambda _: None, must_run=True)

    def _retry_later(self, plan: Plan, reply: Reply, done: Done[pb.AdmitResponse]) -> None:
        task = asyncio.create_task(self._rebuild_and_retry(plan, reply, done))
        self._retries.add(task)
        task.add_done_callback(self._retries.discard)

    async def _rebuild_and_retry(
        self, plan: Plan, reply: Reply, done: Done[pb.AdmitResponse]
    ) -> None:
        answer: pb.AdmitResponse | None = None
        try:
            async with asyncio.timeout(self._rebuild_timeout_s):
                if self._rebuilder is not None:
                    await self._rebuilder.rebuild(plan, windows_of(plan.charges, reply))
                    reply = await self._batcher.call(admit_op(plan))
            if reply[0] != _UNSEEDED:
                answer = self._decide(plan, reply)
        except (HeadraceError, TimeoutError):
            # The ledger or Redis is away: said by the answer and by their own metrics.
            answer = None
        finally:
            self._finish(plan, answer or self._local.admit(plan), done)

    def _finish(self, plan: Plan, answer: pb.AdmitResponse, done: Done[pb.AdmitResponse]) -> None:
        if plan.mode is Mode.NORMAL:
            self._count(answer)
        done(answer)

    def _finish_decided(self, plan: Plan, reply: Reply, done: Done[pb.AdmitResponse]) -> None:
        answer = self._decide(plan, reply)
        if plan.mode is not Mode.NORMAL or reply[0] != _ADMITTED[0]:
            self._finish(plan, answer, done)
            return
        if not self._num_admitted:
            asyncio.get_running_loop().call_soon(self._count_admitted)
        self._num_admitted += 1
        done(answer)

    def _count_admitted(self) -> None:
        self._counter(_ADMITTED).inc(self._num_admitted)
        self._num_admitted = 0

    def _count(self, answer: pb.AdmitResponse) -> None:
        self._counter((answer.outcome, answer.binding_dimension, answer.degraded)).inc()

    def _counter(self, label: _Label) -> Counter:
        counter = self._counters.get(label)
        if counter is None:
            outcome = pb.AdmitResponse.Outcome.Name(label[0])
            dimension = pb.Dimension.Name(label[1])
            counter = self._counters[label] = self._metrics.decisions.labels(
                outcome.removeprefix("OUTCOME_").lower(),
                dimension.removeprefix("DIMENSION_").lower() if label[1] else "none",
                str(label[2]).lower(),
            )
        return counter
