"""Many calls on one stream: a batch in, answers out as they are ready.

Nothing that a caller does to its stream takes back a call that it sent: a call is started, and the
stream only reads its answer. A call costs no task, and an answer is written once (`proto_wire`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from headrace_common.errors import HeadraceError, InvalidRequest
from headrace_common.lifecycle import cancel_and_wait
from headrace_common.proto_wire import Encoded, bytes_tag, number_tag, varint, with_length
from headrace_common.rpc_status import to_status
from headrace_common.telemetry import start_span
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb

_Result = pb.AdmitResponse | pb.SettleResponse | pb.RenewResponse
_SERVICE = pb.DESCRIPTOR.services_by_name["RateLimit"].full_name
_NAMES = {name.lower(): f"{_SERVICE}/{name}" for name in ("Admit", "Settle", "Renew")}
_FIELDS = pb.LimitAnswer.DESCRIPTOR.fields_by_name
_TAGS = {name: bytes_tag(field.number) for name, field in _FIELDS.items()}
_CALL_ID = number_tag(_FIELDS["call_id"].number)
_ANSWERS = bytes_tag(pb.AnswerBatch.DESCRIPTOR.fields_by_name["answers"].number)


class Starter(Protocol):
    """The single calls; `done` is called once, unless the start raises."""

    def admit(
        self, request: pb.AdmitRequest, done: Callable[[pb.AdmitResponse | HeadraceError], None]
    ) -> None:
        """Start an admission."""

    def settle(
        self, request: pb.SettleRequest, done: Callable[[pb.SettleResponse | HeadraceError], None]
    ) -> None:
        """Start a settlement."""

    def renew(
        self, request: pb.RenewRequest, done: Callable[[pb.RenewResponse | HeadraceError], None]
    ) -> None:
        """Start a renewal."""


class AnswerQueue:
    """Answers that wait for the writer of one stream."""

    def __init__(self) -> None:
        self._answers: list[bytes] = []
        self._filled = asyncio.Event()
        self._num_awaited = 0
        self._is_ending = False

    def expect(self, num_calls: int) -> None:
        """Say that so many answers will come."""
        self._num_awaited += num_calls

    def put(self, call_id: int, field: str, encoded: bytes) -> None:
        """Add an answer to the next message: what `LimitAnswer` has in one of its fields."""
        self._num_awaited -= 1
        answer = b"".join((_CALL_ID, varint(call_id), _TAGS[field], with_length(encoded)))
        self._answers.append(_ANSWERS + with_length(answer))
        self._filled.set()

    def end(self) -> None:
        """Say that no further calls follow."""
        self._is_ending = True
        self._filled.set()

    async def take(self) -> Encoded | None:
        """Wait for answers and take all that are ready; None = all calls were answered."""
        while not self._answers:
            if self._is_ending and not self._num_awaited:
                return None
            self._filled.clear()
            await self._filled.wait()
        answers, self._answers = self._answers, []
        return Encoded(b"".join(answers))


async def exchange(
    calls: Starter, batches: AsyncIterator[pb.CallBatch], stopping: asyncio.Event
) -> AsyncIterator[Encoded]:
    """Serve one stream until its caller ends it or *stopping* is set; what was read is answered.

    Yields:
        `AnswerBatch` messages.
    """
    answers = AnswerQueue()

    async def read() -> None:
        try:
            async for batch in batches:
                answers.expect(len(batch.calls))
                for call in batch.calls:
                    start_call(calls, call, answers.put)
        finally:
            answers.end()

    async def watch() -> None:
        await stopping.wait()
        reader.cancel()

    reader = asyncio.create_task(read())
    watcher = asyncio.create_task(watch())
    try:
        while (batch := await answers.take()) is not None:
            yield batch
    finally:
        await cancel_and_wait(reader, watcher)


def start_call(calls: Starter, call: pb.LimitCall, put: Callable[[int, str, bytes], None]) -> None:
    """Start one call of a batch; *put* gets its answer, maybe at once: see `AnswerQueue.put`."""
    call_id = call.call_id
    kind = call.WhichOneof("call") or ""
    traced = start_span(_NAMES.get(kind, kind), call.traceparent) if call.traceparent else None

    def done(result: _Result | HeadraceError) -> None:
        if traced is not None:
            traced.end()
        if isinstance(result, HeadraceError):
            put(call_id, "status", to_status(result).SerializeToString())
        else:
            put(call_id, kind, result.SerializeToString())

    try:
        match kind:
            case "admit":
                calls.admit(call.admit, done)
            case "settle":
                calls.settle(call.settle, done)
            case "renew":
                calls.renew(call.renew, done)
            case _:
                raise InvalidRequest("The call does not say what it is.", param="call")
    except HeadraceError as error:
        done(error)
