"""One replica at work on a job: how it was chosen, and what its events say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol

from headrace_common.clock import Clock
from headrace_common.errors import HeadraceError, ReplicaLost
from headrace_common.price_rows import cached_tokens
from headrace_common.session_call import SessionCall
from headrace_contracts.types.v1.types_pb2 import ReplicaRef
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_gateway.job import Job
from headrace_gateway.model_directory import ref_key

GenerateCall = SessionCall[pb.GenerateRequest, pb.GenerateEvent]


class Outlet(NamedTuple):
    """What becomes of a job's events; what it raises ends the job, as no failure of the replica."""

    # Called for each event, with its deltas of living choices. Raises nothing.
    take: Callable[[Job, Sequence[pb.ChoiceDelta]], None]
    # Asked after what came together: whether more may come at once, as the client reads.
    try_pass: Callable[[], bool]
    # Awaited where it may not.
    wait: Callable[[], Awaitable[object]]


class Attempt(Protocol):
    """A chosen replica, however it was chosen, and how long that took in a queue."""

    ref: ReplicaRef
    address: str
    queue_s: float
    # Of the worker that computes the prompt for it; empty = it does so itself.
    prefill_address: str

    def first_token(self, cached_tokens: int, ttft_s: float, num_tokens: int) -> None:
        """Report that the prompt is computed, and how much came with the first token."""

    def output(self, num_tokens: int) -> None:
        """Report how much was generated."""

    def failed(self, reason: str) -> None:
        """Report that the replica failed the request."""

    def end(self) -> None:
        """Give the load back."""


class OutletError(Exception):
    """The outlet failed: to be told from what the replica's end of the call raises."""

    def __init__(self, error: HeadraceError) -> None:
        super().__init__(error)
        self.error = error


class Reading:
    """Takes the events of one attempt, mostly in the turn in which they come."""

    __slots__ = (
        "_attempt",
        "_call",
        "_clock",
        "_is_first",
        "_is_text",
        "_job",
        "_num_before",
        "_outlet",
        "_started_s",
    )

    def __init__(
        self,
        job: Job,
        attempt: Attempt,
        call: GenerateCall,
        outlet: Outlet,
        clock: Clock,
        started_s: float,
    ) -> None:
        self._job, self._attempt, self._call, self._outlet = job, attempt, call, outlet
        self._clock, self._started_s = clock, started_s
        # By an earlier replica, if this one takes over.
        self._num_before = job.num_output
        self._is_first, self._is_text = True, job.is_text

    async def to_end(self) -> None:
        """Take events until the worker ends the call.

        Raises:
            OutletError: what the outlet raised.
            HeadraceError: what the worker said, or became of it.
        """
        while True:
            if await self._call.wait(self._take_ready):
                event = await self._call.receive()
                if event is None:
                    return
                self._take(event)
                if self._take_ready():
                    continue
            try:
                await self._outlet.wait()
            except HeadraceError as error:
                raise OutletError(error) from error

    def _take(self, event: pb.GenerateEvent) -> None:
        """Note an event and give it to the outlet."""
        job = self._job
        if self._is_first:
            _note_start(job, self._attempt, event)
        has_tokens, is_edge = False, not job.tokens
        # As a list: protobuf's iterators end by an exception of Python's.
        living: Sequence[pb.ChoiceDelta] = event.deltas[:]
        if job.finished:
            living = [delta for delta in living if delta.choice_idx not in job.finished]
        for delta in living:
            if ids := delta.token_ids:
                has_tokens = True
                # As a list at once: to step through protobuf's costs more for a single one even.
                job.tokens.setdefault(delta.choice_idx, []).extend(ids[:])
                job.num_output += len(ids)
            if delta.finish_reason:
                is_edge = True
                _note_end(job, delta)
        if is_edge or not has_tokens:
            # What comes once comes first or last.
            _note_rest(job, event)
        if event.HasField("usage"):
            job.counted = event
        if self._is_text:
            has_tokens = _take_text(job, event, living)
        if has_tokens and self._is_first:
            self._is_first = False
            ttft_s = self._clock.now_s() - self._started_s
            num_tokens = job.num_output - self._num_before
            self._attempt.first_token(cached_tokens(job.read_usage()), ttft_s, num_tokens)
        self._outlet.take(job, living)

    def _take_ready(self) -> bool:
        """Take all that is there: one report, one look at the client. Whether more may come."""
        for event in self._call.take_ready():
            self._take(event)
        job = self._job
        self._attempt.output(job.num_output - self._num_before)
        if job.finished and job.is_done:
            return True
        try:
            return self._outlet.try_pass()
        except HeadraceError as error:
            raise OutletError(error) from error


def _note_start(job: Job, attempt: Attempt, event: pb.GenerateEvent) -> None:
    if not event.HasField("started"):
        return
    started = event.started
    if job.queue_s is None:
        job.queue_s = attempt.queue_s + started.queue_s
    ref = started.replica if started.HasField("replica") else attempt.ref
    if not job.replicas or ref_key(job.replicas[-1]) != ref_key(ref):
        job.replicas.append(ref)


def _note_end(job: Job, delta: pb.ChoiceDelta) -> None:
    if delta.finish_reason == pb.FINISH_REASON_ABORT:
        raise ReplicaLost("The replica gave the request up.")
    job.finished.add(delta.choice_idx)


def _note_rest(job: Job, event: pb.GenerateEvent) -> None:
    if event.HasField("timings"):
        job.timings = event.timings
    if event.prompt_logprobs:
        job.prompt_logprobs = list(event.prompt_logprobs)


def _take_text(job: Job, event: pb.GenerateEvent, deltas: Sequence[pb.ChoiceDelta]) -> bool:
    """Note an event of an engine that tells no ids; its counts stand as told."""
    job.is_estimate, job.num_output = event.usage_is_estimate, job.read_usage().output_tokens
    began = not job.has_text and any(delta.text for delta in deltas)
    job.has_text = job.has_text or began
    return began
