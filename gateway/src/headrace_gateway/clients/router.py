"""The router: one Pick call per attempt, and the replica list."""

from __future__ import annotations

from collections.abc import AsyncIterator

from headrace_common.errors import NoReplica, ReplicaLost
from headrace_common.proto_wire import Encoded, bytes_tag, with_length
from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_common.session_call import SessionCall
from headrace_contracts.router.v1 import router_pb2 as pb

_SERVICE = pb.DESCRIPTOR.services_by_name["Router"]
_PICK = method_ref(_SERVICE, "Pick", pb.PickMessage, pb.Decision)
_DECISION = method_ref(_SERVICE, "GetDecision", pb.GetDecisionRequest, pb.Decision)
_DECISION_TIMEOUT_S = 1.0
_WATCH = method_ref(_SERVICE, "WatchReplicas", pb.WatchReplicasRequest, pb.ReplicaList)
_ASKED, _PROGRESS = (
    bytes_tag(pb.PickMessage.DESCRIPTOR.fields_by_name[it].number) for it in ("pick", "progress")
)

# It answers in milliseconds or lets the request queue: silence says that it is frozen or far
# behind, and meanwhile the last list of replicas serves better, without a further burden on it.
_PATIENCE_S = 0.3
# Generated tokens between two reports: fairness and load are counted in hundreds.
_PROGRESS_TOKENS = 32


class Pick:
    """A decision whose load the router counts until `end`."""

    def __init__(
        self, call: SessionCall[pb.PickMessage, pb.Decision], decision: pb.Decision
    ) -> None:
        self._call = call
        self.ref, self.address = decision.replica, decision.address
        # Seconds in the router's queue.
        self.queue_s = decision.queue_s
        # Of the worker that computes the prompt for it; empty = it does so itself.
        self.prefill_address = decision.prefill_address
        self._told_tokens = 0

    def first_token(self, cached_tokens: int, ttft_s: float, num_tokens: int) -> None:
        """Tell the router that the prompt is computed, and what came with the first token.

        A lost router is no error here.
        """
        self._told_tokens = num_tokens
        self._tell(
            first_token=True, cached_tokens=cached_tokens, ttft_s=ttft_s, output_tokens=num_tokens
        )

    def output(self, num_tokens: int) -> None:
        """Tell the router now and then how much was generated. A lost router is no error here."""
        if num_tokens - self._told_tokens >= _PROGRESS_TOKENS:
            self._told_tokens = num_tokens
            self._tell(output_tokens=num_tokens)

    def failed(self, reason: str) -> None:
        """Tell the router that the replica failed the request. A lost router is no error here."""
        self._tell(failed_reason=reason)

    def end(self) -> None:
        """Give the load back, once the router has taken what was told before. Idempotent."""
        self._call.finish()

    def _tell(self, **progress: float | str) -> None:
        encoded = pb.PickProgress(**progress).SerializeToString()  # type: ignore[arg-type]
        try:
            self._call.send_encoded(_PROGRESS + with_length(encoded))
        except ReplicaLost:
            return


class RouterClient:
    """Calls to the router."""

    def __init__(self, address: str) -> None:
        self._session = SessionClient(address, _PATIENCE_S)

    async def pick(self, request: pb.PickRequest, timeout_s: float) -> Pick:
        """Ask for a replica; the call stays open until `Pick.end`.

        Raises:
            HeadraceError: the router's refusal, or `ReplicaLost` / `Deadline` of the way there.
        """
        first = Encoded(_ASKED + with_length(request.SerializeToString()))
        call = await self._session.start(_PICK, first, timeout_s=timeout_s)
        try:
            decision = await call.receive()
            if decision is None:
                raise NoReplica("The router gave no answer.", retry_after_s=1.0)
        except BaseException:
            call.cancel()
            raise
        return Pick(call, decision)

    async def fetch_decision(self, request_id: str) -> pb.Decision:
        """Return why a recent request went where it went.

        Raises:
            NotFound: the router has forgotten it.
            HeadraceError: no answer in time.
        """
        request = pb.GetDecisionRequest(request_id=request_id)
        return await self._session.unary(_DECISION, request, timeout_s=_DECISION_TIMEOUT_S)

    async def watch_replicas(self) -> AsyncIterator[pb.ReplicaList]:
        """Yield the replica list, at once and at each change."""
        async for replicas in self._session.stream(_WATCH, pb.WatchReplicasRequest()):
            yield replicas

    async def close(self) -> None:
        """End the connection."""
        await self._session.close()
