"""Many calls on one stream: a batch in, answers out as they are ready.

Nothing that a caller does to its stream takes back a call that it sent: the calls are tasks of
their own, and the stream only reads their answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Protocol

from headrace_common.errors import HeadraceError, InvalidRequest
from headrace_common.lifecycle import cancel_and_wait
from headrace_common.rpc import Call
from headrace_common.rpc_status import to_status
from headrace_contracts.ratelimit.v1 import ratelimit_pb2 as pb


class Servicer(Protocol):
    """The single calls."""

    def Admit(self, request: pb.AdmitRequest, call: Call, /) -> Awaitable[pb.AdmitResponse]: ...  # noqa: D102, N802 - contract name
    def Settle(self, request: pb.SettleRequest, call: Call, /) -> Awaitable[pb.SettleResponse]: ...  # noqa: D102, N802 - contract name
    def Renew(self, request: pb.RenewRequest, call: Call, /) -> Awaitable[pb.RenewResponse]: ...  # noqa: D102, N802 - contract name


class AnswerQueue:
    """Answers that wait for the writer of one stream."""

    def __init__(self) -> None:
        self._answers: list[pb.LimitAnswer] = []
        self._filled = asyncio.Event()
        self._num_awaited = 0
        self._is_ending = False

    def expect(self, num_calls: int) -> None:
        """Say that so many answers will come."""
        self._num_awaited += num_calls

    def put(self, answer: pb.LimitAnswer) -> None:
        """Add an answer to the next message."""
        self._num_awaited -= 1
        self._answers.append(answer)
        self._filled.set()

    def end(self) -> None:
        """Say that no further calls follow."""
        self._is_ending = True
        self._filled.set()

    async def take(self) -> pb.AnswerBatch | None:
        """Wait for answers and take all that are ready; None = all calls were answered."""
        while not self._answers:
            if self._is_ending and not self._num_awaited:
                return None
            self._filled.clear()
            await self._filled.wait()
        answers, self._answers = self._answers, []
        return pb.AnswerBatch(answers=answers)


def failure(call_id: int, error: HeadraceError) -> pb.LimitAnswer:
    """Return the answer that tells an error."""
    return pb.LimitAnswer(call_id=call_id, status=to_status(error).SerializeToString())


async def exchange(
    servicer: Servicer, batches: AsyncIterator[pb.CallBatch], call: Call
) -> AsyncIterator[pb.AnswerBatch]:
    """Serve one stream by the servicer's single calls."""
    answers = AnswerQueue()
    running: set[asyncio.Task[None]] = set()

    async def serve(limit_call: pb.LimitCall) -> None:
        answers.put(await _answer(servicer, limit_call, call))

    async def read() -> None:
        try:
            async for batch in batches:
                answers.expect(len(batch.calls))
                for limit_call in batch.calls:
                    task = asyncio.create_task(serve(limit_call))
                    running.add(task)
                    task.add_done_callback(running.discard)
        finally:
            answers.end()

    reader = asyncio.create_task(read())
    try:
        while (batch := await answers.take()) is not None:
            yield batch
    finally:
        await cancel_and_wait(reader)


async def _answer(servicer: Servicer, limit_call: pb.LimitCall, call: Call) -> pb.LimitAnswer:
    answer = pb.LimitAnswer(call_id=limit_call.call_id)
    try:
        match limit_call.WhichOneof("call"):
            case "admit":
                answer.admit.CopyFrom(await servicer.Admit(limit_call.admit, call))
            case "settle":
                answer.settle.CopyFrom(await servicer.Settle(limit_call.settle, call))
            case "renew":
                answer.renew.CopyFrom(await servicer.Renew(limit_call.renew, call))
            case _:
                raise InvalidRequest("The call says not what it is.", param="call")
    except HeadraceError as error:
        return failure(limit_call.call_id, error)
    return answer
