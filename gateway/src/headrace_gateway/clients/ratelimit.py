"""The rate limiter: admit, settle, renew, all on one stream.

What callers start in one turn of the loop goes out as one message, and so do the answers: at load a
call costs a small share of a message. A caller that leaves takes nothing back that it has sent.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import Callable
from functools import partial

from google.rpc import status_pb2

from headrace_common.awake import MAX_STALLS, STALL_S, awake_timeout
from headrace_common.deadlines import Deadlines, Waits
from headrace_common.errors import Deadline, HeadraceError, ReplicaLost
from headrace_common.lifecycle import cancel_and_wait
from headrace_common.proto_wire import bytes_tag, number_tag, varint, with_length
from headrace_common.rpc import method_ref
from headrace_common.rpc_status import from_status
from headrace_common.session import SessionClient
from headrace_common.session_call import SessionCall
from headrace_common.telemetry import sampled_traceparent
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb

_SERVICE = pb.DESCRIPTOR.services_by_name["RateLimit"]
_EXCHANGE = method_ref(_SERVICE, "Exchange", pb.CallBatch, pb.AnswerBatch)
# Nobody waits for these two for long; they are repeated.
_BACKGROUND_TIMEOUT_S = 2.0
_FIELDS = pb.LimitCall.DESCRIPTOR.fields_by_name
_CALL_ID = number_tag(_FIELDS["call_id"].number)
_TRACEPARENT = bytes_tag(_FIELDS["traceparent"].number)
_ADMIT, _SETTLE, _RENEW = (bytes_tag(_FIELDS[it].number) for it in ("admit", "settle", "renew"))
_CALLS = bytes_tag(pb.CallBatch.DESCRIPTOR.fields_by_name["calls"].number)


# An answer to come, what is called if it comes too late, and where that stands.
_Waiting = tuple["asyncio.Future[pb.LimitAnswer]", Callable[[], None], Waits]


class RateLimitClient:
    """Calls to the rate limiter. All raise `HeadraceError` when no answer comes in time."""

    def __init__(self, address: str, admit_timeout_s: float) -> None:
        self._session, self._admit_timeout_s = SessionClient(address), admit_timeout_s
        self._stream: _Stream | None = None
        # All who call while there is no stream wait for the same one.
        self._opening: asyncio.Task[_Stream] | None = None
        self._ids = itertools.count(1)

    async def admit(self, request: pb.AdmitRequest) -> pb.AdmitResponse:
        """Check and charge all limits at once."""
        return (await self._ask(_ADMIT, request, self._admit_timeout_s)).admit

    async def settle(self, request: pb.SettleRequest) -> pb.SettleResponse:
        """Replace a reservation by what was used. Idempotent."""
        return (await self._ask(_SETTLE, request, _BACKGROUND_TIMEOUT_S)).settle

    def settle_soon(self, request: pb.SettleRequest) -> asyncio.Future[pb.LimitAnswer] | None:
        """Settle without waiting, if the stream is open. Else None, and nothing was done."""
        stream = self._stream
        if stream is None or not stream.is_open:
            return None
        return self._begin(stream, _SETTLE, request, _BACKGROUND_TIMEOUT_S)

    async def renew(self, request: pb.RenewRequest) -> pb.RenewResponse:
        """Keep leases alive."""
        return (await self._ask(_RENEW, request, _BACKGROUND_TIMEOUT_S)).renew

    async def close(self) -> None:
        """End the connection."""
        await cancel_and_wait(self._opening)
        if self._stream is not None:
            await self._stream.close()
        await self._session.close()

    async def _ask(
        self,
        tag: bytes,
        request: pb.AdmitRequest | pb.SettleRequest | pb.RenewRequest,
        timeout_s: float,
    ) -> pb.LimitAnswer:
        stream = self._stream
        if stream is None or not stream.is_open:
            stream = await self._opened(timeout_s)
        return await self._begin(stream, tag, request, timeout_s)

    def _begin(
        self,
        stream: _Stream,
        tag: bytes,
        request: pb.AdmitRequest | pb.SettleRequest | pb.RenewRequest,
        timeout_s: float,
    ) -> asyncio.Future[pb.LimitAnswer]:
        call_id = next(self._ids)
        parts = [_CALL_ID, varint(call_id), tag, with_length(request.SerializeToString())]
        if traceparent := sampled_traceparent():
            parts += (_TRACEPARENT, with_length(traceparent.encode()))
        return stream.start(call_id, b"".join(parts), timeout_s)

    async def _opened(self, timeout_s: float) -> _Stream:
        """Return the open stream, or raise as `_ask`. A caller that gives up ends it for nobody."""
        if self._opening is None:
            # In a context of its own: the stream is no part of the request that opens it.
            self._opening = asyncio.create_task(self._open(), context=contextvars.Context())
            # Asking for the exception marks it as seen, also if nobody waits any more.
            self._opening.add_done_callback(lambda it: it.cancelled() or it.exception())
        opening = self._opening
        try:
            async with awake_timeout(timeout_s):
                await asyncio.wait({opening})
        except TimeoutError:
            raise Deadline("The rate limiter takes no connection.") from None
        if opening.cancelled():
            raise ReplicaLost("The connection to the rate limiter was closed.")
        return opening.result()

    async def _open(self) -> _Stream:
        try:
            if self._stream is not None:
                await self._stream.close()
            self._stream = _Stream(await self._session.start(_EXCHANGE))
            return self._stream
        finally:
            self._opening = None


class _Stream:
    """One life of the stream."""

    def __init__(self, call: SessionCall[pb.CallBatch, pb.AnswerBatch]) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._deadlines = Deadlines(self._loop)
        self._waiting: dict[int, _Waiting] = {}
        self._ready: list[bytes] = []
        self.is_open = True
        self._reader = asyncio.create_task(self._read())

    def start(self, call_id: int, call: bytes, timeout_s: float) -> asyncio.Future[pb.LimitAnswer]:
        """Send a call with whatever else is ready.

        Args:
            call_id: of the call.
            call: a `LimitCall` as it is on the wire.
            timeout_s: longest wait.

        Returns:
            The answer, or the limiter's error; `Deadline` or `ReplicaLost` if none came.
        """
        answer: asyncio.Future[pb.LimitAnswer] = self._loop.create_future()
        if not self._ready:
            self._loop.call_soon(self._flush)
        self._ready.append(_CALLS + with_length(call))
        late = partial(self._on_late, call_id, self._loop.time() + timeout_s, timeout_s, MAX_STALLS)
        self._waiting[call_id] = answer, late, self._deadlines.add(timeout_s, late)
        return answer

    async def close(self) -> None:
        """End the stream; calls that wait fail."""
        self._fail()
        self._deadlines.close()
        self._call.cancel()
        await cancel_and_wait(self._reader)

    def _on_late(self, call_id: int, due_s: float, timeout_s: float, stalls: int) -> None:
        now_s = self._loop.time()
        answer = self._waiting[call_id][0]
        if now_s - due_s >= STALL_S and stalls and not answer.done():
            again = partial(self._on_late, call_id, now_s + timeout_s, timeout_s, stalls - 1)
            self._waiting[call_id] = answer, again, self._deadlines.add(timeout_s, again)
            return
        del self._waiting[call_id]
        if not answer.done():
            answer.set_exception(Deadline("The rate limiter took too long."))

    def _flush(self) -> None:
        calls, self._ready = self._ready, []
        try:
            self._call.send_encoded(b"".join(calls))
        except ReplicaLost:
            self._fail()

    async def _read(self) -> None:
        try:
            while (batch := await self._call.receive()) is not None:
                for answer in batch.answers:
                    waiting = self._waiting.pop(answer.call_id, None)
                    if waiting is not None:
                        _end(waiting, answer)
        except HeadraceError:
            # Told to every caller below.
            pass
        finally:
            self._fail()

    def _fail(self) -> None:
        self.is_open = False
        for waiting in self._waiting.values():
            _end(waiting, ReplicaLost("The connection to the rate limiter broke."))
        self._waiting.clear()


def _end(waiting: _Waiting, told: pb.LimitAnswer | HeadraceError) -> None:
    answer, late, deadline = waiting
    deadline.discard(late)
    if answer.done():
        # Its caller has left.
        return
    if isinstance(told, HeadraceError):
        answer.set_exception(told)
    elif told.status:
        answer.set_exception(from_status(status_pb2.Status.FromString(told.status)))
    else:
        answer.set_result(told)
