"""A router without index and queue: the whole contract over a given list, for gateways' tests.

    router = FakeRouter()
    router.add_worker("w1", worker_server.address, [worker.card()])
    async with FakeRouterServer(router) as server: ...

The same conformance suite runs against it and the real service
(tests/contract/test_router_conformance.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from headrace_common.errors import HeadraceError, InvalidRequest, ModelNotFound, NoReplica, NotFound
from headrace_common.rpc import Call
from headrace_common.rpc_server import RpcServer
from headrace_contracts.router.v1 import router_pb2 as pb
from headrace_contracts.types.v1.types_pb2 import ReplicaRef
from headrace_contracts.worker.v1.worker_pb2 import WORKER_STATE_READY, ModelCard, WorkerState

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["Router"]


@dataclass
class FakeRouter:
    """Router servicer that picks the ready replica with the fewest running picks.

    Attributes:
        refuse_with: raised by every pick, until set to None again.
        gate: while it is not set, picks wait as in a queue.
        refuse_behind_gate: raised by every pick that has waited, until set to None again.
        picks: every request taken.
        progress: every report taken, by request id.
        running: replica of each pick whose call has not ended, by request id.
        has_undescribed_models: said with the list.
    """

    refuse_with: HeadraceError | None = None
    refuse_behind_gate: HeadraceError | None = None
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    picks: list[pb.PickRequest] = field(default_factory=list)
    progress: dict[str, list[pb.PickProgress]] = field(default_factory=dict)
    running: dict[str, ReplicaRef] = field(default_factory=dict)
    has_undescribed_models: bool = False

    def __post_init__(self) -> None:
        self.gate.set()
        self._replicas: dict[str, pb.Replica] = {}
        self._decisions: dict[str, pb.Decision] = {}
        self._version = 0
        self._changed: set[asyncio.Event] = set()

    def add_worker(
        self, worker_id: str, address: str, cards: Iterable[ModelCard], incarnation: int = 1
    ) -> None:
        """Add a ready replica, or one more life of a known one."""
        self._replicas[worker_id] = pb.Replica(
            replica=ReplicaRef(worker_id=worker_id, incarnation=incarnation),
            address=address,
            state=WORKER_STATE_READY,
            reachable=True,
            models=cards,
        )
        self._change()

    def set_state(self, worker_id: str, state: WorkerState.ValueType) -> None:
        """Change what the replica list says of a worker."""
        self._replicas[worker_id].state = state
        self._change()

    def set_waiting(self, worker_id: str, num_waiting: int) -> None:
        """Let a worker say that requests queue there."""
        self._replicas[worker_id].load.num_waiting = num_waiting
        self._change()

    def set_reachable(self, worker_id: str, reachable: bool) -> None:
        """Say whether the router reaches a worker."""
        self._replicas[worker_id].reachable = reachable
        self._change()

    async def Pick(  # noqa: N802 - contract name
        self, requests: AsyncIterator[pb.PickMessage], _call: Call
    ) -> AsyncIterator[pb.Decision]:
        """Decide, then take progress until the call ends."""
        first = await anext(requests, None)
        if first is None or not first.HasField("pick"):
            raise InvalidRequest("A pick begins with its request.", param="pick")
        _check(first.pick)
        self.picks.append(first.pick)
        if self.refuse_with is not None:
            raise self.refuse_with
        await self.gate.wait()
        if self.refuse_behind_gate is not None:
            raise self.refuse_behind_gate
        decision = self._decide(first.pick)
        request_id = first.pick.request_id
        self.running[request_id] = decision.replica
        try:
            yield decision
            async for message in requests:
                if not message.HasField("progress"):
                    raise InvalidRequest("After the request only progress may follow.")
                self.progress.setdefault(request_id, []).append(message.progress)
        finally:
            self.running.pop(request_id, None)

    async def WatchReplicas(  # noqa: N802 - contract name
        self, _request: pb.WatchReplicasRequest, _call: Call
    ) -> AsyncIterator[pb.ReplicaList]:
        """Send the replica list at once and at each change."""
        changed = asyncio.Event()
        self._changed.add(changed)
        try:
            while True:
                changed.clear()
                yield pb.ReplicaList(
                    version=self._version,
                    replicas=self._replicas.values(),
                    has_undescribed_models=self.has_undescribed_models,
                )
                await changed.wait()
        finally:
            self._changed.discard(changed)

    async def GetDecision(self, request: pb.GetDecisionRequest, _call: Call) -> pb.Decision:  # noqa: N802 - contract name
        """Tell why a request went where it went."""
        decision = self._decisions.get(request.request_id)
        if decision is None:
            raise NotFound("No such decision is remembered.", param="request_id")
        return decision

    def _decide(self, request: pb.PickRequest) -> pb.Decision:
        serving = [
            one
            for one in self._replicas.values()
            if any(card.model == request.model for card in one.models)
        ]
        if not serving:
            raise ModelNotFound(f"The model {request.model!r} is not served here.", param="model")
        reasons = {one.replica.worker_id: _unfit(one, request) for one in serving}
        fit = [one for one in serving if not reasons[one.replica.worker_id]]
        if not fit:
            raise NoReplica(f"No replica of {request.model!r} is ready.", retry_after_s=1.0)
        chosen = min(fit, key=lambda one: self._load(one.replica))
        decision = pb.Decision(
            request_id=request.request_id,
            replica=chosen.replica,
            address=chosen.address,
            policy="fake",
            candidates=[
                pb.Candidate(
                    replica=one.replica,
                    filtered_by=reasons[one.replica.worker_id],
                    load_tokens=self._load(one.replica),
                )
                for one in serving
            ],
        )
        self._decisions[request.request_id] = decision
        return decision

    def _load(self, replica: ReplicaRef) -> int:
        lives = [self.picks_by_id(i) for i, where in self.running.items() if where == replica]
        return sum(max(one.prompt_tokens, 1) for one in lives)

    def picks_by_id(self, request_id: str) -> pb.PickRequest:
        """Return the last pick of a request."""
        return next(one for one in reversed(self.picks) if one.request_id == request_id)

    def _change(self) -> None:
        self._version += 1
        for changed in self._changed:
            changed.set()


def _check(request: pb.PickRequest) -> None:
    if not request.request_id or not request.model:
        raise InvalidRequest("A pick names its request and model.", param="request_id")
    if len(request.block_hashes) % 16:
        raise InvalidRequest("The block hashes are cut.", param="block_hashes")
    if request.block_hashes and not request.block_size_tokens:
        raise InvalidRequest("Block hashes come with their size.", param="block_size_tokens")
    num_blocks = len(request.block_hashes) // 16
    if num_blocks * request.block_size_tokens > max(request.prompt_tokens, 1):
        raise InvalidRequest("More blocks than the prompt has tokens.", param="block_hashes")


def _unfit(one: pb.Replica, request: pb.PickRequest) -> str:
    if not one.reachable:
        return "unreachable"
    if one.state != WORKER_STATE_READY:
        return "draining"
    return "excluded" if one.replica in request.excluded else ""


class FakeRouterServer:
    """A fake router behind a real `RpcServer` on a free port; an async context manager."""

    def __init__(self, router: FakeRouter | None = None, address: str = "127.0.0.1:0") -> None:
        self.router = router or FakeRouter()
        self._server = RpcServer(address, [(DESCRIPTOR, self.router)])

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self._server.port}"

    async def __aenter__(self) -> FakeRouterServer:
        await self._server.start()
        await self._server.set_ready(True)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._server.stop(0)
