"""An engine used from plain code: requests in, outputs with their times out of a queue.

For benches and proofs; a worker hands outputs to its event loop instead.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

from headrace_common.blocks import BLOCK_SIZE_TOKENS
from headrace_common.clock import SystemClock
from headrace_worker.engine.block_events import BlockEventLog
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.load import StepFacts
from headrace_worker.engine.output import RequestOutput
from headrace_worker.engine.request import Request
from headrace_worker.engine.scheduler import SchedulerLimits
from headrace_worker.model_host import ReadyModel

_WAIT_S = 600.0


class DirectEngine:
    """A running engine while the `with` block lasts.

    Args:
        model: what runs.
        limits: sizes of steps and queue; see `limits_for`.
        num_blocks: size of the KV pool, at most the model's; None = all of it.
        on_step: gets the facts of each step, on the engine's thread.
    """

    def __init__(
        self,
        model: ReadyModel,
        limits: SchedulerLimits,
        num_blocks: int | None = None,
        on_step: Callable[[StepFacts], None] | None = None,
    ) -> None:
        self._outputs: queue.SimpleQueue[tuple[float, RequestOutput]] = queue.SimpleQueue()
        self.engine = Engine(
            runner=model.runner,
            num_blocks=num_blocks or model.num_blocks,
            limits=limits,
            table=model.table,
            events=BlockEventLog(),
            sink=self._take,
            clock=SystemClock(),
            on_step=on_step or _ignore,
        )

    def __enter__(self) -> DirectEngine:
        self.engine.start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.engine.stop()

    def submit(self, request: Request) -> float:
        """Hand a request over; return when, by `time.perf_counter`."""
        at_s = time.perf_counter()
        self.engine.submit(request)
        return at_s

    def next(self, timeout_s: float = _WAIT_S) -> tuple[float, RequestOutput]:
        """Return the next output and when the engine gave it, by `time.perf_counter`.

        Raises:
            HeadraceError: it says that its request failed.
            queue.Empty: none came in time.
        """
        at_s, output = self.next_or_error(timeout_s)
        if output.error is not None:
            raise output.error
        return at_s, output

    def next_or_error(self, timeout_s: float = _WAIT_S) -> tuple[float, RequestOutput]:
        """Return the next output, a failed request's too.

        Raises:
            queue.Empty: none came in time.
        """
        return self._outputs.get(timeout=timeout_s)

    def _take(self, outputs: list[RequestOutput]) -> None:
        at_s = time.perf_counter()
        for output in outputs:
            self._outputs.put((at_s, output))


def limits_for(
    model: ReadyModel,
    token_budget: int = 256,
    max_running: int = 64,
    max_waiting: int = 1024,
    slowdown_ratio: float = SchedulerLimits.slowdown_ratio,
    *,
    checks_books: bool = False,
) -> SchedulerLimits:
    """Return limits for *model*, by default with a queue that nothing fills."""
    return SchedulerLimits(
        token_budget=token_budget,
        max_running=min(max_running, token_budget),
        max_waiting=max_waiting,
        context_tokens=model.info.context_tokens,
        block_size=BLOCK_SIZE_TOKENS,
        slowdown_ratio=slowdown_ratio,
        checks_books=checks_books,
    )


def _ignore(_facts: StepFacts) -> None:
    pass
