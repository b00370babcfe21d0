"""One prompt through one or more replicas: pick, generate, and resume where the last one was lost.

::

    pick --> generate --events--> done
      ^          |
      '-- lost, draining, full: excluded, with the same seed and the tokens made so far

Randomness at the workers is a function of (seed, position), so the text goes on as if nothing had
happened. Usage counts are cumulative over the request's life; the last worker's are the request's.

Before the first token a retry is paid out of a budget; a stream under way always goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

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
from headrace_common.session_call import SessionCall
from headrace_common.telemetry import span
from headrace_contracts.router.v1.router_pb2 import PickRequest
from headrace_contracts.types.v1.types_pb2 import ReplicaRef
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_gateway.attempt import Attempt, GenerateCall, Outlet, OutletError, Reading
from headrace_gateway.clients.router import Pick
from headrace_gateway.job import Job, copied
from headrace_gateway.metrics import GatewayMetrics
from headrace_gateway.model_directory import ModelDirectory
from headrace_gateway.retry_budget import RetryBudget

_log = logging.getLogger(__name__)

EmbedCall = SessionCall[pb.EmbedRequest, pb.EmbedResponse]
# A stream that lost its last replica waits so long for another to come up.
_REPLACEMENT_WAIT_S = 8.0
_REPLACEMENT_POLL_S = 0.25
# What failed a job is tried again if so much later nothing else is there: it may have been frozen.
_SECOND_CHANCE_S = 1.0


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
            except OutletError as failed:
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
        self, attempt: Attempt, request: pb.EmbedRequest, deadline_s: float
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

    async def _choose(self, job: Job, deadline_s: float, failure: Unavailable | None) -> Attempt:
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
        if left_s <= 0 or (job.has_spare and not job.has_tokens):
            return False
        absences, model = self.directory.absences, job.pick.model
        if job.pick.excluded and absences.is_served(model):
            await asyncio.sleep(_SECOND_CHANCE_S)
            if absences.is_served(model):
                del job.pick.excluded[:]
            return True
        if job.has_tokens:
            await asyncio.sleep(_REPLACEMENT_POLL_S)
            return True
        return await absences.until_back(model, left_s)

    async def _pick(self, job: Job, deadline_s: float) -> Attempt:
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

    def _guess(self, job: Job) -> Attempt:
        self.metrics.degraded.labels("router").inc()
        replica = self.directory.least_loaded(job.pick.model, job.pick.excluded)
        return _Guessed(replica.replica, replica.address)

    async def _attempt(self, job: Job, attempt: Attempt, deadline_s: float, outlet: Outlet) -> None:
        started_s = self.clock.now_s()
        calls: list[SessionCall[Any, Any]] = []
        with self.directory.running_on(attempt.ref, attempt.address, partial(_lose, calls)):
            request = job.resumed()
            if attempt.prefill_address:
                request = copied(request)
                request.kv_source.address = attempt.prefill_address
            call = await self.workers.generate(attempt.address, request, deadline_s - started_s)
            calls.append(call)
            try:
                await Reading(job, attempt, call, outlet, self.clock, started_s).to_end()
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


def _tell_failed(attempt: Attempt, error: Unavailable) -> None:
    """Tell the router, unless the replica only had no place or is leaving."""
    if not isinstance(error, QueueFull | ReplicaDraining):
        attempt.failed(error.reason)


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
