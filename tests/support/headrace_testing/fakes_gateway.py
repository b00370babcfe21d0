"""What a gateway needs around it: router, guard, rate limiter and usage log in memory.

Each servicer speaks its whole contract behind a real `RpcServer`, so the real session transport is
in between. They are small on purpose: `FakeGuard` knows words, `FakeRateLimit` counts requests.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from google.protobuf.descriptor import ServiceDescriptor

from headrace_common.errors import HeadraceError, NoReplica, NotFound
from headrace_common.rpc import Call
from headrace_common.rpc_server import RpcServer
from headrace_contracts.guard.v1 import guard_pb2
from headrace_contracts.ratelimit.v1 import ratelimit_pb2
from headrace_contracts.router.v1 import router_pb2
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent
from headrace_contracts.worker.v1 import worker_pb2
from headrace_testing.fake_worker import FakeWorkerServer

ROUTER = router_pb2.DESCRIPTOR.services_by_name["Router"]
GUARD = guard_pb2.DESCRIPTOR.services_by_name["Guard"]
RATE_LIMIT = ratelimit_pb2.DESCRIPTOR.services_by_name["RateLimit"]


class FakeServer:
    """One fake behind a real server. Use as an async context manager; `restart` keeps the port."""

    def __init__(self, descriptor: ServiceDescriptor, servicer: object) -> None:
        self._descriptor, self._servicer = descriptor, servicer
        self._address = "127.0.0.1:0"
        self._server: RpcServer | None = None

    @property
    def address(self) -> str:
        """Where it listens, also while it is down."""
        return self._address

    async def start(self) -> None:
        """Listen."""
        self._server = RpcServer(self._address, [(self._descriptor, self._servicer)])
        await self._server.start()
        await self._server.set_ready(True)
        self._address = f"127.0.0.1:{self._server.port}"

    async def kill(self) -> None:
        """Cut every connection."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def __aenter__(self) -> FakeServer:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.kill()


class FakeRouter:
    """Picks the replica with the fewest open picks, in the order they were added."""

    def __init__(self) -> None:
        self.workers: list[FakeWorkerServer] = []
        self.failure: HeadraceError | None = None
        # States told instead of the workers' own.
        self.states: dict[str, worker_pb2.WorkerState.ValueType] = {}
        # For tests: every request, open picks by worker, progress reports.
        self.picks: list[router_pb2.PickRequest] = []
        self.open_picks: Counter[str] = Counter()
        self.progress: list[router_pb2.PickProgress] = []
        self._version = 0

    async def Pick(  # noqa: N802 - contract name
        self, messages: AsyncIterator[router_pb2.PickMessage], _call: Call
    ) -> AsyncIterator[router_pb2.Decision]:
        """One attempt."""
        request = (await anext(messages)).pick
        self.picks.append(request)
        if self.failure is not None:
            raise self.failure
        server = self._choose(request)
        worker_id = server.worker.worker_id
        self.open_picks[worker_id] += 1
        try:
            yield router_pb2.Decision(
                request_id=request.request_id,
                replica=server.worker.replica,
                address=server.address,
                policy="fake",
            )
            async for message in messages:
                self.progress.append(message.progress)
        finally:
            self.open_picks[worker_id] -= 1

    async def WatchReplicas(  # noqa: N802 - contract name
        self, _request: router_pb2.WatchReplicasRequest, _call: Call
    ) -> AsyncIterator[router_pb2.ReplicaList]:
        """The list, at once and ten times a second."""
        while True:
            self._version += 1
            yield router_pb2.ReplicaList(
                version=self._version, replicas=[self._replica(it) for it in self.workers]
            )
            await asyncio.sleep(0.1)

    async def GetDecision(  # noqa: N802 - contract name
        self, _request: router_pb2.GetDecisionRequest, _call: Call
    ) -> router_pb2.Decision:
        """Nothing is remembered."""
        raise NotFound("No decision is kept.")

    def _choose(self, request: router_pb2.PickRequest) -> FakeWorkerServer:
        excluded = {(ref.worker_id, ref.incarnation) for ref in request.excluded}
        left = [
            server
            for server in self.workers
            if (server.worker.worker_id, server.worker.incarnation) not in excluded
        ]
        if not left:
            raise NoReplica("No replica is left.", retry_after_s=1.0)
        return min(left, key=lambda server: self.open_picks[server.worker.worker_id])

    def _replica(self, server: FakeWorkerServer) -> router_pb2.Replica:
        worker = server.worker
        state = worker_pb2.WORKER_STATE_READY
        if worker.switches.loading:
            state = worker_pb2.WORKER_STATE_LOADING
        return router_pb2.Replica(
            replica=worker.replica,
            address=server.address,
            state=self.states.get(worker.worker_id, state),
            reachable=True,
            models=[] if worker.switches.loading else [worker.card()],
        )


@dataclass
class FakeGuard:
    """Blocks and redacts words. Holds back what may become a blocked one."""

    blocked: tuple[str, ...] = ()
    redacted: tuple[str, ...] = ()
    failure: HeadraceError | None = None
    # After so many output texts of one answer, that answer's check fails.
    fail_output_after: int | None = None
    inputs: list[guard_pb2.CheckInputRequest] = field(default_factory=list)

    async def CheckInput(  # noqa: N802 - contract name
        self, request: guard_pb2.CheckInputRequest, _call: Call
    ) -> guard_pb2.CheckInputResponse:
        """Look for the words in every part."""
        self.inputs.append(request)
        if self.failure is not None:
            raise self.failure
        answer = guard_pb2.CheckInputResponse(verdict=_verdict(guard_pb2.ACTION_ALLOW))
        for part_idx, part in enumerate(request.parts):
            if any(word in part.text for word in (*self.blocked, *request.policy.blocklist)):
                answer.verdict.CopyFrom(_verdict(guard_pb2.ACTION_BLOCK, part_idx))
                return answer
            text = part.text
            for word in self.redacted:
                text = text.replace(word, "[X]")
            if text != part.text:
                answer.redacted_parts[part_idx] = text
        if answer.redacted_parts:
            answer.verdict.CopyFrom(_verdict(guard_pb2.ACTION_REDACT))
        return answer

    async def CheckOutput(  # noqa: N802 - contract name
        self, messages: AsyncIterator[guard_pb2.CheckOutputRequest], _call: Call
    ) -> AsyncIterator[guard_pb2.CheckOutputResponse]:
        """Judge growing texts."""
        opened = (await anext(messages)).open
        words = (*self.blocked, *opened.policy.blocklist)
        held: dict[int, str] = {}
        released: Counter[int] = Counter()
        stopped: set[int] = set()
        num_texts = 0
        async for message in messages:
            num_texts += 1
            if self.failure is not None:
                raise self.failure
            if self.fail_output_after is not None and num_texts > self.fail_output_after:
                raise HeadraceError("the test said so")
            idx = message.text.choice_idx
            if idx in stopped:
                continue
            text = held.pop(idx, "") + message.text.text
            answer = guard_pb2.CheckOutputResponse(choice_idx=idx, last=message.text.last)
            if any(word in text for word in words):
                stopped.add(idx)
                text = text[: min(text.find(word) for word in words if word in text)]
                answer.verdict.CopyFrom(_verdict(guard_pb2.ACTION_BLOCK, idx))
                answer.last = True
            elif not message.text.last:
                keep = _live_from(text, words)
                held[idx], text = text[keep:], text[:keep]
            answer.released = text
            released[idx] += len(text)
            answer.released_chars = released[idx]
            yield answer


def _live_from(text: str, words: tuple[str, ...]) -> int:
    """Where a beginning of one of the words starts at the end of *text*."""
    for start in range(len(text)):
        if any(word.startswith(text[start:]) for word in words):
            return start
    return len(text)


def _verdict(action: guard_pb2.Action.ValueType, part_idx: int | None = None) -> guard_pb2.Verdict:
    is_clean = action == guard_pb2.ACTION_ALLOW
    verdict = guard_pb2.Verdict(
        state=guard_pb2.VERDICT_STATE_CLEAN if is_clean else guard_pb2.VERDICT_STATE_HIT,
        action=action,
    )
    if part_idx is not None:
        verdict.findings.add(
            category="blocklist", detector="fake", part_idx=part_idx, action=action
        )
    return verdict


@dataclass
class FakeRateLimit:
    """Counts requests per scope and holds leases; everything else passes."""

    failure: HeadraceError | None = None
    # Returned instead of a decision.
    answer: ratelimit_pb2.AdmitResponse | None = None
    admitted: list[ratelimit_pb2.AdmitRequest] = field(default_factory=list)
    settled: dict[str, ratelimit_pb2.Amounts] = field(default_factory=dict)
    renewed: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def open_leases(self) -> set[str]:
        """Leases that nobody settled."""
        return {request.lease_id for request in self.admitted} - set(self.settled)

    async def Admit(  # noqa: N802 - contract name
        self, request: ratelimit_pb2.AdmitRequest, _call: Call
    ) -> ratelimit_pb2.AdmitResponse:
        """Admit while requests per minute last."""
        if self.failure is not None:
            raise self.failure
        if self.answer is not None:
            return self.answer
        states = []
        for scope in request.scopes:
            limit = scope.limits.requests_per_minute
            if limit and self.counts[scope.scope_id] >= limit:
                return self._denial(scope)
            if limit:
                states.append(_requests_left(scope, limit - self.counts[scope.scope_id] - 1))
        self.counts.update(scope.scope_id for scope in request.scopes)
        self.admitted.append(request)
        return ratelimit_pb2.AdmitResponse(
            outcome=ratelimit_pb2.AdmitResponse.OUTCOME_ADMITTED, states=states
        )

    async def Settle(  # noqa: N802 - contract name
        self, request: ratelimit_pb2.SettleRequest, _call: Call
    ) -> ratelimit_pb2.SettleResponse:
        """Note what was used; the second time is told."""
        if self.failure is not None:
            raise self.failure
        is_new = request.lease_id not in self.settled
        self.settled.setdefault(request.lease_id, request.actual)
        return ratelimit_pb2.SettleResponse(settled=is_new)

    async def Renew(  # noqa: N802 - contract name
        self, request: ratelimit_pb2.RenewRequest, _call: Call
    ) -> ratelimit_pb2.RenewResponse:
        """Note who is renewed."""
        self.renewed += request.lease_ids
        return ratelimit_pb2.RenewResponse()

    def _denial(self, scope: ratelimit_pb2.Scope) -> ratelimit_pb2.AdmitResponse:
        return ratelimit_pb2.AdmitResponse(
            outcome=ratelimit_pb2.AdmitResponse.OUTCOME_DENIED,
            binding_level=scope.level,
            binding_dimension=ratelimit_pb2.DIMENSION_REQUESTS_PER_MINUTE,
            retry_after_us=29_200_000,
            states=[_requests_left(scope, 0)],
        )


def _requests_left(scope: ratelimit_pb2.Scope, remaining: int) -> ratelimit_pb2.DimensionState:
    return ratelimit_pb2.DimensionState(
        level=scope.level,
        dimension=ratelimit_pb2.DIMENSION_REQUESTS_PER_MINUTE,
        limit=scope.limits.requests_per_minute,
        remaining=remaining,
        reset_us=29_200_000,
    )


@dataclass
class MemoryUsageLog:
    """Keeps usage events; `is_full` refuses new requests."""

    is_full: bool = False
    events: list[UsageEvent] = field(default_factory=list)

    async def start(self) -> None:
        """Nothing to take over."""

    async def close(self) -> None:
        """Nothing to write."""

    async def opened(self, event: UsageEvent) -> None:
        """Keep it."""
        self.events.append(event)

    async def closed(self, event: UsageEvent) -> None:
        """Keep it, as durable as memory is."""
        await asyncio.sleep(0)
        self.events.append(event)

    def closed_events(self) -> list[UsageEvent]:
        """Endings, in order."""
        return [event for event in self.events if event.kind == UsageEvent.KIND_CLOSED]

    def open_requests(self) -> set[str]:
        """Requests that were opened and not closed."""
        opened = {it.request_id for it in self.events if it.kind == UsageEvent.KIND_OPENED}
        return opened - {it.request_id for it in self.closed_events()}
