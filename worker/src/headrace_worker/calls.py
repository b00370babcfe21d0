"""The Generate calls under way: engine outputs come in per step, each caller takes at its pace.

A caller that reads slowly gets fewer, larger events: what waits for it is merged, so that memory is
bounded by the request's own output. Everything here lives on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from headrace_common.errors import HeadraceError
from headrace_worker.engine.output import RequestOutput
from headrace_worker.engine.request import Finish, Request


class GenerateCall:
    """One call: what the engine said and the caller has not taken yet.

    Args:
        request: what the engine was given.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.finish: Finish | None = None
        self._pending: RequestOutput | None = None
        self._filled = asyncio.Event()

    def push(self, output: RequestOutput) -> None:
        """Add a step's output to what waits."""
        for part in output.choices:
            self.finish = part.finish or self.finish
        self._pending = output if self._pending is None else _merged(self._pending, output)
        self._filled.set()

    def fail(self, error: HeadraceError) -> None:
        """End the call with an error, after what waits; not if its regular end waits."""
        if self._pending is None:
            self._pending = RequestOutput(self.request.key, usage=None)
        if not self._pending.is_last:
            self._pending.error = self._pending.error or error
        self._filled.set()

    async def take(self) -> RequestOutput:
        """Wait for output and return all there is."""
        await self._filled.wait()
        self._filled.clear()
        output, self._pending = self._pending, None
        assert output is not None, "filled without output"  # noqa: S101 - programmer's mistake
        return output


class Calls:
    """All calls under way.

    Args:
        on_end: told of each request when the engine is done with it, whether or not its caller
            is still there.
    """

    def __init__(self, on_end: Callable[[GenerateCall, RequestOutput], None]) -> None:
        self._on_end = on_end
        self._in_engine: dict[int, GenerateCall] = {}
        self._served: dict[int, GenerateCall] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_served(self) -> int:
        """Calls whose caller is still there."""
        return len(self._served)

    def open(self, request: Request) -> GenerateCall:
        """Register a call before its request goes to the engine."""
        call = GenerateCall(request)
        self._in_engine[request.key] = self._served[request.key] = call
        self._idle.clear()
        return call

    def close(self, call: GenerateCall) -> bool:
        """Note that the caller is gone or served; True if the engine still works for it."""
        self._served.pop(call.request.key, None)
        if not self._served:
            self._idle.set()
        return call.request.key in self._in_engine

    def dispatch(self, outputs: Iterable[RequestOutput]) -> None:
        """Hand a step's outputs to their calls."""
        for output in outputs:
            call = self._in_engine.get(output.key)
            if call is None:
                continue
            call.push(output)
            if output.is_last:
                del self._in_engine[output.key]
                self._on_end(call, output)

    def fail_all(self, error: HeadraceError) -> int:
        """End all served calls with *error*; return how many."""
        for call in self._served.values():
            call.fail(error)
        return len(self._served)

    async def wait_idle(self, within_s: float) -> bool:
        """Wait until no call is served; False if that takes too long."""
        try:
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


def _merged(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    by_idx = {part.choice_idx: part for part in earlier.choices}
    for part in later.choices:
        if part.choice_idx in by_idx:
            by_idx[part.choice_idx].merge(part)
        else:
            earlier.choices.append(part)
    earlier.usage = later.usage
    earlier.queue_s = earlier.queue_s if later.queue_s is None else later.queue_s
    earlier.prompt_logprobs.extend(later.prompt_logprobs)
    earlier.embedding = later.embedding
    earlier.times = later.times
    earlier.error = earlier.error or later.error
    earlier.is_last = later.is_last
    return earlier
