"""Workers: one session per address, kept while the replica list names it."""

from __future__ import annotations

from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_common.session_call import SessionCall
from headrace_contracts.worker.v1 import worker_pb2 as pb

_SERVICE = pb.DESCRIPTOR.services_by_name["Worker"]
_GENERATE = method_ref(_SERVICE, "Generate", pb.GenerateRequest, pb.GenerateEvent)
_EMBED = method_ref(_SERVICE, "Embed", pb.EmbedRequest, pb.EmbedResponse)
_TOKENIZER = method_ref(_SERVICE, "FetchTokenizer", pb.FetchTokenizerRequest, pb.TokenizerChunk)
_TOKENIZER_TIMEOUT_S = 60.0
# Before the first token. The router takes a worker for frozen after as long without a report.
_PATIENCE_S = 2.0
# Behind it, before a stream moves. A worker beats once a second, whatever its engine computes:
# no gap over 1.04 s under a flood of prompts, with twelve busy processes beside it on two cores.
_SILENCE_S = 3.0


class WorkerSessions:
    """The gateway's connections to workers."""

    def __init__(self) -> None:
        self._sessions: dict[str, SessionClient] = {}

    async def generate(
        self, address: str, request: pb.GenerateRequest, timeout_s: float
    ) -> SessionCall[pb.GenerateRequest, pb.GenerateEvent]:
        """Start a generation. Leaving the returned call's block cancels it at the worker.

        Raises:
            ReplicaLost: the worker cannot be reached.
        """
        session = self._session(address)
        return await session.start(_GENERATE, request, is_only=True, timeout_s=timeout_s)

    async def embed(
        self, address: str, request: pb.EmbedRequest, timeout_s: float
    ) -> SessionCall[pb.EmbedRequest, pb.EmbedResponse]:
        """Begin to embed token sequences; the one answer is the returned call's, see `generate`.

        Raises:
            ReplicaLost: the worker cannot be reached.
        """
        session = self._session(address)
        return await session.start(_EMBED, request, is_only=True, timeout_s=timeout_s)

    async def fetch_tokenizer(self, address: str, model: str) -> bytes:
        """Fetch a model's tokenizer.json.

        Raises:
            HeadraceError: the worker's refusal or the connection's end.
        """
        request = pb.FetchTokenizerRequest(model=model)
        chunks = self._session(address).stream(_TOKENIZER, request, timeout_s=_TOKENIZER_TIMEOUT_S)
        return b"".join([chunk.data async for chunk in chunks])

    async def forget_all_but(self, addresses: set[str]) -> None:
        """Close the sessions of workers that are gone."""
        for address in set(self._sessions) - addresses:
            await self._sessions.pop(address).close()

    async def close(self) -> None:
        """Close every session."""
        await self.forget_all_but(set())

    def _session(self, address: str) -> SessionClient:
        session = self._sessions.get(address)
        if session is None:
            session = self._sessions[address] = SessionClient(address, _PATIENCE_S, _SILENCE_S)
        return session
