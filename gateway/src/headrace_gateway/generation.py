"""One prompt through one or more replicas: pick, generate, and resume where the last one was lost.

::

    pick --> generate --events--> done
      ^          |
      '-- lost, draining, full: excluded, with the same seed and the tokens made so far

Randomness at the workers is a function of (seed, position), so the text goes on as if nothing had
happened. Usage counts are cumulative over the request's life; the last worker's are the request's.

Before the first token a retry is paid out of a budget; a stream under way always goes on.
Long because an attempt, its failure and the next one share one job.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from headrace_common.clock import Clock
from headrace_common.errors import (
    HeadraceError,
    Internal,
    ModelNotFound,
    NoReplica,
    QueueFull,
    ReplicaDraining,
    ReplicaLost,
    Unavailable,
    Unimplemented,
)
from headrace_common.price_rows import cached_tokens
from headrace_common.session import SessionCall
from headrace_common.telemetry import span
from headrace_contracts.router.v1.router_pb2 import PickRequest
from headrace_contracts.types.v1.types_pb2 import ReplicaRef, TokenUsage
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_gateway.clients.router import Pick
from headrace_gateway.metrics import GatewayMetrics
from headrace_gateway.model_directory import ModelDirectory, ref_key
from headrace_gateway.retry_budget import RetryBudget

_log = logging.getLogger(__name__)

GenerateCall = SessionCall[pb.GenerateRequest, pb.GenerateEvent]
EmbedCall = SessionCall[pb.EmbedRequest, pb.EmbedResponse]
# A stream that lost its last replica waits so long for another to come up.
_REPLACEMENT_WAIT_S = 8.0
_REPLACEMENT_POLL_S = 0.25


class Picker(Protocol):
    """What the router offers here."""

    async def pick(self, request: PickRequest, timeout_s: float) -> Pick:
        """Choose a replica and count its load until the pick ends."""
        ...


class WorkerCalls(Protocol):
    """What workers offer here."""

    async def generate(
        self, address: str, request: pb.GenerateRequest, timeout_s: float
    ) -> GenerateCall:
        """Start a generation."""
        ...

    async def embed(self, address: str, request: pb.EmbedRequest, timeout_s: float) -> EmbedCall:
        """Begin to embed token sequences."""
        ...


@dataclass(slots=True)
class Job:
    """One prompt to be answered, and what has come of it."""

    pick: PickRequest
    generate: pb.GenerateRequest
    # Index of its first choice in the whole answer.
    first_choice_idx: int = 0
    replicas: list[ReplicaRef] = field(default_factory=list)
    # The newest event with counts that nobody has asked for yet, and those before it.
    counted: pb.GenerateEvent | None = None
    counts: TokenUsage = field(default_factory=TokenUsage)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    # Of `tokens`, all choices together; of an engine that tells no ids, as it counts.
    num_output: int = 0
    finished: set[int] = field(default_factory=set)
    # Time that the first attempt spent in queues, of router and worker; None = not known yet.
    queue_s: float | None = None
    # As the last worker told them.
    timings: pb.Timings | None = None
    # Whether another model stands ready for it, so that it waits for no replica of this one.
    has_spare: bool = False
    # Text that goes before each choice's own.
    echo: str = ""
    prompt_logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    # Of an engine that tells no ids: whether any output came, and whether its counts are a guess.
    has_text: bool = False
    is_estimate: bool = False
    # Whether its engine tells no ids.
    is_text: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_text = self.generate.HasField("text")

    def read_usage(self) -> TokenUsage:
        """Return the counts so far; the newest event's are read now."""
        if self.counted is not None:
            usage, self.counted = self.counted.usage, None
            if usage.prompt_tokens:
                # Not copied: nobody else has the event.
                self.counts = usage
        if not self.is_text:
            # Counted here: a worker that took over counts again what it redid of ended choices.
            self.counts.output_tokens = self.num_output
        return self.counts

    @property
    def is_resumable(self) -> bool:
        """Whether another replica could go on where one was lost."""
        return not (self.has_text and self.is_text)

    @property
    def is_done(self) -> bool:
        """Whether every choice has ended."""
        return len(self.finished) >= self.generate.n

    @property
    def has_tokens(self) -> bool:
        """Whether any output exists."""
        return self.has_text or any(self.tokens.values())

    def resumed(self) -> pb.GenerateRequest:
        """Return the request for the next attempt: with what was made so far."""
        if not self.tokens:
            return self.generate
        request = _copied(self.generate)
        for choice_idx in sorted(self.tokens):
            request.resume.append(
                pb.ResumeChoice(choice_idx=choice_idx, output_token_ids=self.tokens[choice_idx])
            )
        return request


class Outlet(NamedTuple):
    """What becomes of a job's events; what it raises ends the job, as no failure of the replica."""

    # Called for each event, with its deltas of living choices. Raises nothing.
    take: Callable[[Job, Sequence[pb.ChoiceDelta]], None]
    # Asked after what came together: whether more may come at once, as the client reads.
    try_pass: Callable[[], bool]
    # Awaited where it may not.
    wait: Callable[[], Awaitable[object]]


class _Attempt(Protocol):
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


class _Guessed:
    """Chosen here, from the last list."""

    def __init__(self, ref: ReplicaRef, address: str) -> None:
        self.ref, self.address = ref, address
        self.queue_s, self.prefill_address = 0.0, ""

    def first_token(self, cached_tokens: int, ttft_s: float, num_tokens: int) -> None:
        """Nobody to tell."""

    def output(self, num_tokens: int) -> None:
        """Nobody to tell."""

    def failed(self, reason: str) -> None:
        """Nobody to tell."""

    def end(self) -> None:
        """Nothing to give back."""


@dataclass(frozen=True)
class Generator:
    """Runs jobs. Shared by all requests.

    Args:
        router: chooses replicas.
        workers: sessions to them.
        directory: the fallback when the router is gone, and news of stuck replicas.
        clock: time.
        metrics: resumes and degraded picks are counted.
        retries: what pays for further attempts at a first token.
        max_attempts: most replicas tried for one job.
        replica_wait_s: a request whose model lost its last replica waits so long for one.
    """

    router: Picker
    workers: WorkerCalls
    directory: ModelDirectory
    clock: Clock
    metrics: GatewayMetrics
    retries: RetryBudget
    max_attempts: int = 4
    replica_wait_s: float = 0.0

    async def run(self, job: Job, deadline_s: float, outlet: Outlet) -> None:
        """Generate until every choice has ended. Cancelling it aborts the work at the worker.

        Args:
            job: grows as events come.
            deadline_s: monotonic time at which workers and router give up.
            outlet: gets each event.

        Raises:
            HeadraceError: no replica could finish the job.
        """
        num_attempts, failure = 0, None
        self.retries.add_request()
        while not job.is_done:
            attempt = await self._choose(job, deadline_s, failure)
            num_attempts += 1
            try:
                await self._attempt(job, attempt, deadline_s, outlet)
            except _OutletError as failed:
                raise failed.error from failed.error.__cause__
            except Unavailable as error:
                if job.is_done:
                    return
                failure = error
                _tell_failed(attempt, error)
                if not job.is_resumable:
                    raise _not_resumable() from error
                self.metrics.resumes.labels(error.reason).inc()
                job.pick.excluded.append(attempt.ref)
                _log.info("%s left %s: %s", job.pick.request_id, attempt.address, error)
                if num_attempts >= self.max_attempts:
                    raise _final(error) from error
            finally:
                attempt.end()
            if failure is not None and not job.is_done and not job.has_tokens:
                await self._pay_retry(failure, num_attempts)

    async def embed(
        self, job: Job, request: pb.EmbedRequest, deadline_s: float
    ) -> list[pb.Embedding]:
        """Embed on a replica, or on others where that fails.

        Args:
            job: says where it may run; its usage and replicas are noted.
            request: all inputs.
            deadline_s: monotonic time at which it is given up.

        Raises:
            HeadraceError: no replica could do it.
        """
        failure: Unavailable | None = None
        self.retries.add_request()
        for num_failures in range(self.max_attempts):
            if failure is not None:
                await self._pay_retry(failure, num_failures)
            attempt = await self._choose(job, deadline_s, failure)
            try:
                answer = await self._embed_on(attempt, request, deadline_s)
            except Unavailable as error:
                failure = error
                _tell_failed(attempt, error)
                job.pick.excluded.append(attempt.ref)
            else:
                job.replicas.append(attempt.ref)
                job.counts = answer.usage
                job.queue_s = attempt.queue_s
                return list(answer.embeddings)
            finally:
                attempt.end()
        raise _final(failure or Unavailable("No replica could embed.", retry_after_s=1.0))

    async def _embed_on(
        self, attempt: _Attempt, request: pb.EmbedRequest, deadline_s: float
    ) -> pb.EmbedResponse:
        calls: list[SessionCall[Any, Any]] = []
        with self.directory.running_on(attempt.ref, attempt.address, partial(_lose, calls)):
            timeout_s = deadline_s - self.clock.now_s()
            async with await self.workers.embed(attempt.address, request, timeout_s) as call:
                calls.append(call)
                answer = await call.receive()
        if answer is None:
            raise ReplicaLost("The replica ended without an answer.")
        return answer

    async def _pay_retry(self, failure: Unavailable, num_failures: int) -> None:
        """Wait a little before another replica is asked for a first token, if that may be at all.

        Raises:
            HeadraceError: the budget of retries is used up.
        """
        # Leaving in good order is announced; it says nothing of a fleet in trouble.
        if not isinstance(failure, ReplicaDraining) and not self.retries.try_take():
            self.metrics.retries.labels("refused").inc()
            raise _final(failure) from failure
        self.metrics.retries.labels("made").inc()
        await asyncio.sleep(self.retries.wait_s(num_failures))

    async def _choose(self, job: Job, deadline_s: float, failure: Unavailable | None) -> _Attempt:
        """Pick; wait for a replica where the model has none but had one a moment ago."""
        wait_s = _REPLACEMENT_WAIT_S if job.has_tokens else self.replica_wait_s
        give_up_s = self.clock.now_s() + wait_s
        while True:
            try:
                with span("pick", attributes={"attempt": len(job.pick.excluded) + 1}):
                    return await self._pick(job, deadline_s)
            except (NoReplica, ModelNotFound):
                if isinstance(failure, QueueFull):
                    raise _final(failure) from None
                left_s = min(give_up_s, deadline_s) - self.clock.now_s()
                if not await self._may_return(job, left_s):
                    raise

    async def _may_return(self, job: Job, left_s: float) -> bool:
        """Wait until it is worth while to pick again; False = it is not."""
        if not job.has_tokens:
            absences = self.directory.absences
            return not job.has_spare and await absences.until_back(job.pick.model, left_s)
        if left_s > 0:
            await asyncio.sleep(_REPLACEMENT_POLL_S)
        return left_s > 0

    async def _pick(self, job: Job, deadline_s: float) -> _Attempt:
        started_s = self.clock.now_s()
        if not self.directory.is_following:
            return self._guess(job)
        try:
            return await self.router.pick(job.pick, deadline_s - started_s)
        except (ReplicaLost, Internal, Unimplemented):
            # The router itself is gone or broken; its refusals are other errors.
            return self._guess(job)
        finally:
            self.metrics.stages_s["pick"].observe(self.clock.now_s() - started_s)

    def _guess(self, job: Job) -> _Attempt:
        self.metrics.degraded.labels("router").inc()
        replica = self.directory.least_loaded(job.pick.model, job.pick.excluded)
        return _Guessed(replica.replica, replica.address)

    async def _attempt(
        self, job: Job, attempt: _Attempt, deadline_s: float, outlet: Outlet
    ) -> None:
        started_s = self.clock.now_s()
        calls: list[SessionCall[Any, Any]] = []
        with self.directory.running_on(attempt.ref, attempt.address, partial(_lose, calls)):
            request = job.resumed()
            if attempt.prefill_address:
                request = _copied(request)
                request.kv_source.address = attempt.prefill_address
            call = await self.workers.generate(attempt.address, request, deadline_s - started_s)
            calls.append(call)
            try:
                reading = _Reading(job, attempt, call, outlet, self.clock, started_s)
                while True:
                    if await call.wait(reading.take_ready):
                        event = await call.receive()
                        if event is None:
                            break
                        reading.take(event)
                        if reading.take_ready():
                            continue
                    await _waited(outlet)
            finally:
                call.cancel()
        if not job.is_done:
            raise ReplicaLost("The replica ended before the answer did.")


def _lose(calls: Sequence[SessionCall[Any, Any]]) -> None:  # Any: whatever messages they have
    """End what runs on a replica that makes no progress."""
    for running in calls:
        # Cancelled first: an error alone counts as the call's end.
        running.cancel()
        running.fail(ReplicaLost("The replica makes no progress."))


class _Reading:
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
        attempt: _Attempt,
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

    def take(self, event: pb.GenerateEvent) -> None:
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

    def take_ready(self) -> bool:
        """Take all that is there: one report, one look at the client. Whether more may come."""
        for event in self._call.take_ready():
            self.take(event)
        job = self._job
        self._attempt.output(job.num_output - self._num_before)
        if job.finished and job.is_done:
            return True
        try:
            return self._outlet.try_pass()
        except HeadraceError as error:
            raise _OutletError(error) from error


class _OutletError(Exception):
    """The outlet failed: to be told from what the replica's end of the call raises."""

    def __init__(self, error: HeadraceError) -> None:
        super().__init__(error)
        self.error = error


async def _waited(outlet: Outlet) -> None:
    try:
        await outlet.wait()
    except HeadraceError as error:
        raise _OutletError(error) from error


def _tell_failed(attempt: _Attempt, error: Unavailable) -> None:
    """Tell the router, unless the replica only had no place or is leaving."""
    if not isinstance(error, QueueFull | ReplicaDraining):
        attempt.failed(error.reason)


def _copied(request: pb.GenerateRequest) -> pb.GenerateRequest:
    copy = pb.GenerateRequest()
    copy.CopyFrom(request)
    return copy


def _note_start(job: Job, attempt: _Attempt, event: pb.GenerateEvent) -> None:
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


def _not_resumable() -> HeadraceError:
    return ReplicaLost(
        "The engine behind this model was lost in mid-answer, and it cannot be resumed elsewhere."
    )


def _final(error: Unavailable) -> HeadraceError:
    """Return what the client is told once no replica is left to try."""
    if isinstance(error, QueueFull):
        return QueueFull(
            "The fleet is full. Try again later.", retry_after_s=error.retry_after_s or 1.0
        )
    return NoReplica("No replica could finish the request.", retry_after_s=1.0)
