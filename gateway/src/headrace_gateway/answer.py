"""One answer on its way: from the workers, through the output check, to the client.

::

    jobs --events--> pump task --text--> OutputCheck --releases--> run() --> sink --> client
                        ^                                            |
                        '------- waits while the client does not read

Log probabilities spell out tokens, so they wait until their text is released, and are dropped where
the guard blocked or replaced text.

Without a guard, and for answers that are sent whole, one task does all of it.

Long because the three ways share what an answer is.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace_common.clock import Clock
from headrace_common.errors import Internal
from headrace_common.lifecycle import cancel_and_wait
from headrace_common.telemetry import span
from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_gateway.api_request import ToolUse
from headrace_gateway.attempt import Outlet
from headrace_gateway.generation import Generator
from headrace_gateway.job import Job
from headrace_gateway.output_check import OutputCheck, Shortcut
from headrace_gateway.tool_calls import CallStart, ToolCallReader

# Prompts of one request that run at the same time.
_MAX_PARALLEL = 8
_REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


class Sink(Protocol):
    """Where a generated answer goes: a stream or a whole."""

    async def begin(self, num_choices: int) -> None:
        """A worker has taken the request."""

    def add_text(
        self, choice_idx: int, text: str, logprobs: Sequence[pb.TokenLogprob] | None
    ) -> None:
        """Text that may go out."""

    def add_call(self, choice_idx: int, call_idx: int, name: str) -> None:
        """The model calls a function; its arguments follow. Never without tools."""

    def add_arguments(self, choice_idx: int, call_idx: int, text: str) -> None:
        """More of a call's arguments, as JSON text; of a custom tool's input, as it is."""

    def add_finish(self, choice_idx: int, reason: str, stop_matched: str = "") -> None:
        """A choice has ended, perhaps by a stop string."""

    async def flush(self) -> None:
        """Send what was added."""

    def try_flush(self) -> bool:
        """Send what was added if nothing must be waited for; False = nothing was sent."""

    async def end(self, usage: TokenUsage) -> None:
        """The request is closed; send the last of it."""

    async def keep_alive(self, every_s: float) -> None:
        """Show that the answer lives whenever nothing was sent for so long; until cancelled."""


class VectorSink(ABC):
    """Where embeddings go: they come all at once."""

    vectors: Sequence[pb.Embedding] = ()

    @abstractmethod
    async def end(self, usage: TokenUsage) -> None:
        """The request is closed; send the vectors."""


@dataclass(slots=True)
class _Choice:
    """What waits for release, and how the choice ended at the worker."""

    finish_reason: str = ""
    stop_matched: str = ""
    is_over: bool = False
    made_bytes: int = 0
    released_bytes: int = 0
    # Each with the number of text bytes up to its token's end.
    logprobs: deque[tuple[int, pb.TokenLogprob]] = field(default_factory=deque)
    # By the guard: its tokens no longer match its text.
    is_changed: bool = False
    # Finds calls in the text; None = no function may be called.
    reader: ToolCallReader | None = None
    # Whether its tokens come with log probabilities.
    has_logprobs: bool = True
    # Its job, while the prompt is still to be repeated before the first text; then None.
    echoes: Job | None = None

    def note(self, delta: pb.ChoiceDelta) -> None:
        if self.has_logprobs:
            for logprob in delta.logprobs:
                self.made_bytes += len(logprob.token)
                self.logprobs.append((self.made_bytes, logprob))
        if delta.finish_reason:
            self.finish_reason = _REASONS.get(delta.finish_reason, "stop")
            self.stop_matched = delta.stop_matched

    def released_logprobs(
        self, text: str, *, is_last: bool, is_changed: bool
    ) -> list[pb.TokenLogprob]:
        self.released_bytes += len(text.encode())
        self.is_changed = self.is_changed or is_changed
        if self.is_changed:
            self.logprobs.clear()
            return []
        # At the end the rest are tokens without text, unless a stop string was cut off.
        bound = self.released_bytes
        if is_last and not self.stop_matched:
            bound = self.made_bytes
        released = []
        while self.logprobs and self.logprobs[0][0] <= bound:
            released.append(self.logprobs.popleft()[1])
        return released


@dataclass(slots=True)
class Delivery:
    """What became of an answer on its way to the client; knows nothing of who made it."""

    # The guard ended it.
    is_blocked: bool = False
    # Characters of generated text given to the sink, by choice.
    sent_chars: dict[int, int] = field(default_factory=dict)
    # Monotonic time of the first text sent; None = none yet.
    first_text_s: float | None = None
    # Text went out without the guard, as the key allows; the guard ended before the answer did.
    went_unguarded: bool = False
    lost_the_guard: bool = False


class _GuardEndedItError(Exception):
    """The guard has ended every choice; the worker need not go on."""


class Answer:
    """Runs the jobs of one request and feeds the sink.

    Args:
        generator: runs jobs.
        jobs: at least one.
        check: open; is closed here.
        sink: gets what is released.
        clock: time.
        on_started: called once, when the first worker has taken a job.
        tools: what calls in the text may be of; None = it holds none.
        is_echo_only: only the prompts are repeated.

    Attributes:
        before_first: awaited before the sink begins; None = nothing is.
    """

    def __init__(
        self,
        generator: Generator,
        jobs: Sequence[Job],
        check: OutputCheck,
        sink: Sink,
        clock: Clock,
        on_started: Callable[[Job], None],
        *,
        tools: ToolUse | None = None,
        is_echo_only: bool = False,
    ) -> None:
        self._generator, self._jobs, self._check = generator, jobs, check
        self._sink, self._clock, self._on_started = sink, clock, on_started
        self.delivery = Delivery()
        self._choices = [
            _Choice(
                reader=None if tools is None else ToolCallReader(tools.customs),
                has_logprobs=job.generate.HasField("logprobs"),
                echoes=job if job.echo else None,
            )
            for job in jobs
            for _ in range(job.generate.n)
        ]
        self._is_echo_only = is_echo_only
        self.before_first: Callable[[], Awaitable[None]] | None = None
        self._num_over = 0
        # Without a guard: what was read before the sink had begun.
        self._taken: list[tuple[int, str, bool]] = []
        # Whether the sink has, where one task does everything.
        self._has_begun = False
        self._has_started = False
        # Set when a worker has taken a job, or none could.
        self._started = asyncio.Event()
        self._may_go_on = asyncio.Event()
        self._may_go_on.set()

    async def run(self, deadline_s: float) -> None:
        """Answer until every choice has ended. Cancelling stops the workers.

        Raises:
            HeadraceError: the answer could not be finished.
        """
        if self._check.is_unguarded and len(self._jobs) == 1:
            await self._run_alone(deadline_s)
            return
        if self._check.is_whole and len(self._jobs) == 1:
            await self._run_whole(deadline_s)
            return
        pump = asyncio.create_task(self._pump(deadline_s))
        try:
            await self._wait_started(pump)
            await self._begin_once()
            shortcut = Shortcut(self._check, self._emit, self._try_flush)
            while (release := await self._check.next_release(shortcut)) is not None:
                self._emit(*release)
                is_over = self._num_over >= len(self._choices)
                if is_over or not self._check.has_ready:
                    await self._flush()
                if is_over:
                    break
            await self._settle(pump)
        finally:
            await cancel_and_wait(pump)
            self._end_check()

    async def _run_alone(self, deadline_s: float) -> None:
        """Without a guard between them, one task reads the worker and writes to the client."""
        try:
            with span("generate", attributes={"jobs": 1}):
                outlet = Outlet(self._take_alone, self._try_send_taken, self._send_taken)
                await self._generator.run(self._jobs[0], deadline_s, outlet)
        finally:
            self._end_check()
        await self._send_taken()
        if self._num_over < len(self._choices):
            raise Internal

    async def _run_whole(self, deadline_s: float) -> None:
        """Nobody reads before the end: one task makes the answer, then hears the guard on it.

        What the guard has said meanwhile is taken between two steps of the worker, so that a
        blocked answer ends there.
        """
        job, num_choices = self._jobs[0], len(self._choices)
        try:
            with span("generate", attributes={"jobs": 1}):
                try:
                    outlet = Outlet(self._take, self._try_take_releases, self._begin_once)
                    await self._generator.run(job, deadline_s, outlet)
                except _GuardEndedItError:
                    return
            self._check.finish()
            await self._begin_once()
            while (release := await self._check.next_release()) is not None:
                self._emit(*release)
                if self._num_over >= num_choices:
                    return
        finally:
            self._end_check()
        raise Internal

    def _try_take_releases(self) -> bool:
        if not self._has_begun:
            return False
        self._check.pass_ready(self._emit)
        if self._num_over >= len(self._choices):
            raise _GuardEndedItError
        return True

    def _end_check(self) -> None:
        self.delivery.went_unguarded = self._check.is_unguarded
        self.delivery.lost_the_guard = self._check.is_lost
        self._check.close()

    def _take_alone(self, job: Job, deltas: Sequence[pb.ChoiceDelta]) -> None:
        if not self._has_started:
            self._note_started(job)
        for delta in deltas:
            choice_idx, is_last = job.first_choice_idx + delta.choice_idx, bool(delta.finish_reason)
            choice, text = self._choices[choice_idx], delta.text
            if is_last or choice.has_logprobs:
                choice.note(delta)
            if text or is_last:
                if self._has_begun:
                    self._emit(choice_idx, text, is_last)
                else:
                    self._taken.append((choice_idx, text, is_last))

    async def _begin_once(self) -> None:
        if not self._has_begun:
            if self.before_first is not None:
                await self.before_first()
            self._has_begun = True
            await self._sink.begin(len(self._choices))

    async def _send_taken(self) -> None:
        await self._begin_once()
        taken, self._taken = self._taken, []
        for it in taken:
            self._emit(*it)
        await self._sink.flush()

    def _try_send_taken(self) -> bool:
        return self._has_begun and self._sink.try_flush()

    def _note_started(self, job: Job) -> None:
        self._has_started = True
        self._on_started(job)
        self._started.set()

    async def _settle(self, pump: asyncio.Task[None]) -> None:
        is_over = self._num_over >= len(self._choices)
        if is_over and not all(job.is_done for job in self._jobs):
            # The guard ended it; the workers need not go on.
            return
        await pump
        if not is_over:
            raise Internal

    async def _pump(self, deadline_s: float) -> None:
        try:
            with span("generate", attributes={"jobs": len(self._jobs)}):
                if len(self._jobs) == 1:
                    await self._run_job(self._jobs[0], deadline_s)
                else:
                    await self._run_all(deadline_s)
        finally:
            self._check.finish()

    async def _run_all(self, deadline_s: float) -> None:
        places = asyncio.Semaphore(_MAX_PARALLEL)

        async def run(job: Job) -> None:
            async with places:
                await self._run_job(job, deadline_s)

        tasks = [asyncio.create_task(run(job)) for job in self._jobs]
        try:
            await asyncio.gather(*tasks)
        finally:
            await cancel_and_wait(*tasks)

    async def _run_job(self, job: Job, deadline_s: float) -> None:
        outlet = Outlet(self._take, self._may_go_on.is_set, self._may_go_on.wait)
        await self._generator.run(job, deadline_s, outlet)

    def _take(self, job: Job, deltas: Sequence[pb.ChoiceDelta]) -> None:
        if not self._has_started:
            self._note_started(job)
        for delta in deltas:
            choice_idx, is_last = job.first_choice_idx + delta.choice_idx, bool(delta.finish_reason)
            choice = self._choices[choice_idx]
            # What is told at the end is kept until then.
            if is_last or choice.has_logprobs:
                choice.note(delta)
            self._check.push(choice_idx, delta.text, is_last=is_last)

    async def _wait_started(self, pump: asyncio.Task[None]) -> None:
        pump.add_done_callback(lambda _: self._started.set())
        await self._started.wait()
        if not self._has_started:
            await pump
            raise Internal

    def _emit(
        self,
        choice_idx: int,
        text: str,
        is_last: bool = False,
        is_blocked: bool = False,
        is_redacted: bool = False,
    ) -> None:
        """Give the sink what may go out: the fields of a `Release`."""
        choice = self._choices[choice_idx]
        if choice.is_over:
            return
        delivery = self.delivery
        sent_chars = delivery.sent_chars.get(choice_idx, 0)
        delivery.sent_chars[choice_idx] = sent_chars + len(text)
        logprobs: Sequence[pb.TokenLogprob] = ()
        if choice.has_logprobs:
            is_changed = is_blocked or is_redacted
            logprobs = choice.released_logprobs(text, is_last=is_last, is_changed=is_changed)
        if delivery.first_text_s is None and (text or logprobs):
            delivery.first_text_s = self._clock.now_s()
        if choice.echoes is not None:
            job, choice.echoes = choice.echoes, None
            of_prompt = job.prompt_logprobs if job.generate.logprobs.prompt else None
            self._sink.add_text(choice_idx, job.echo, of_prompt)
        if choice.reader is not None:
            self._emit_pieces(
                choice_idx, text, choice.reader, logprobs, is_over=is_last or is_blocked
            )
        elif (text or logprobs) and not self._is_echo_only:
            self._sink.add_text(choice_idx, text, logprobs)
        if is_last or is_blocked:
            self._emit_end(choice_idx, choice, is_blocked=is_blocked)

    def _emit_end(self, choice_idx: int, choice: _Choice, *, is_blocked: bool) -> None:
        choice.is_over = True
        self._num_over += 1
        if is_blocked:
            self.delivery.is_blocked = True
            self._sink.add_finish(choice_idx, "content_filter")
            return
        has_called = choice.reader is not None and choice.reader.num_calls > 0
        is_call = has_called and choice.finish_reason == "stop"
        reason = "tool_calls" if is_call else choice.finish_reason
        reason = "length" if self._is_echo_only else reason
        self._sink.add_finish(choice_idx, reason, choice.stop_matched)

    def _emit_pieces(
        self,
        choice_idx: int,
        text: str,
        reader: ToolCallReader,
        logprobs: Sequence[pb.TokenLogprob],
        *,
        is_over: bool,
    ) -> None:
        """Send text and calls apart; log probabilities go with the first text, or alone."""
        pieces = reader.push(text)
        if is_over:
            pieces += reader.finish()
        if logprobs and not any(isinstance(piece, str) for piece in pieces):
            self._sink.add_text(choice_idx, "", logprobs)
        call_idx = reader.num_calls - 1 - sum(isinstance(piece, CallStart) for piece in pieces)
        for piece in pieces:
            if isinstance(piece, str):
                self._sink.add_text(choice_idx, piece, logprobs)
                logprobs = ()
            elif isinstance(piece, CallStart):
                call_idx += 1
                self._sink.add_call(choice_idx, call_idx, piece.name)
            else:
                self._sink.add_arguments(choice_idx, call_idx, piece.text)

    def _try_flush(self) -> bool:
        return self._num_over < len(self._choices) and self._sink.try_flush()

    async def _flush(self) -> None:
        self._may_go_on.clear()
        try:
            await self._sink.flush()
        finally:
            self._may_go_on.set()


def total_usage(jobs: Sequence[Job]) -> TokenUsage:
    """Sum the counts of a request's jobs; read only: a single job's are its own."""
    if len(jobs) == 1:
        return jobs[0].read_usage()
    total = TokenUsage()
    for job in jobs:
        for name in (
            "prompt_tokens",
            "cached_gpu_tokens",
            "cached_cpu_tokens",
            "cached_disk_tokens",
            "cache_write_tokens",
            "output_tokens",
            "reasoning_tokens",
        ):
            setattr(total, name, getattr(total, name) + getattr(job.read_usage(), name))
    return total
