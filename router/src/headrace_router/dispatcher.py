"""Queues and picks: what happens between a request's arrival and its end at the router.

A newcomer that may go at once goes at once; it cannot overtake a waiting request that could have
gone, since those are released at every change of load or replicas. A pass over a queue runs at most
every few milliseconds, however many changes come.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from random import Random

from headrace_common.clock import Clock
from headrace_common.errors import HeadraceError, QueueFull
from headrace_contracts.router.v1.router_pb2 import PickProgress
from headrace_router.candidate import Query
from headrace_router.fairness import VirtualCounters
from headrace_router.load_guard import LoadBook, LoadGuard
from headrace_router.metrics import RouterMetrics
from headrace_router.pick import Choice, Pipeline
from headrace_router.policies import Policy
from headrace_router.policy_file import PolicyFile
from headrace_router.prediction import PrefillPredictor
from headrace_router.queue import ModelQueue, Waiting

# Time between two passes over the queues.
_MIN_PASS_S = 0.003
# A pass without any change: reports grow stale by time alone.
_IDLE_PASS_S = 0.25
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 30.0


class Ticket:
    """A request's place: first in a queue, then on a replica. `close` gives back whichever it has.

    Args:
        query: the request.
        dispatcher: who keeps the queues.
    """

    def __init__(self, query: Query, dispatcher: Dispatcher) -> None:
        self.query, self._dispatcher = query, dispatcher
        self.picked: asyncio.Future[Choice] = asyncio.get_running_loop().create_future()
        self.waiting: Waiting | None = None
        self.guard: LoadGuard | None = None
        self.queue_s = 0.0
        self._choice: Choice | None = None
        self._is_started, self._output_tokens = False, 0

    def leave(self, outcome: Choice | Exception, guard: LoadGuard | None = None) -> None:
        """Take the queue's verdict. Called by the dispatcher."""
        self.waiting, self.guard = None, guard
        if isinstance(outcome, Exception):
            if not self.picked.done():
                self.picked.set_exception(outcome)
            return
        self._choice = outcome
        if not self.picked.done():
            self.picked.set_result(outcome)

    def progress(self, message: PickProgress) -> None:
        """Take a report of how the request goes on."""
        if self.guard is None or self._choice is None:
            return
        if message.first_token and not self._is_started:
            self._is_started = True
            self._dispatcher.started(self.query, self._choice, self.guard, message)
        fresh = message.output_tokens - self._output_tokens
        if fresh > 0:
            self._output_tokens = message.output_tokens
            self.guard.add_output(fresh)
            self._dispatcher.counters.charge(self.query.tenant_id, output_tokens=fresh)

    def close(self) -> None:
        """Leave the queue or give the load back, once. Idempotent."""
        self.picked.cancel()
        if self.picked.done() and not self.picked.cancelled():
            # Marks an exception that nobody awaited as seen.
            self.picked.exception()
        self._dispatcher.close(self)


class Dispatcher:
    """Owns the queues of all models.

    Args:
        pipeline: how a replica is chosen.
        loads: where decisions are booked.
        predictor: learns from what really happened.
        policy_file: policies and bounds.
        clock: time.
        random: tie-breaks.
        metrics: what is counted.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        loads: LoadBook,
        predictor: PrefillPredictor,
        policy_file: PolicyFile,
        clock: Clock,
        random: Random,
        metrics: RouterMetrics,
    ) -> None:
        self._pipeline, self._loads, self._predictor = pipeline, loads, predictor
        self._file, self._clock, self._random = policy_file, clock, random
        self._metrics = metrics
        self._queues: dict[str, ModelQueue] = {}
        self._policies: dict[str, Policy] = {}
        self._changed = asyncio.Event()
        self._mean_own_s = 0.1
        section = policy_file.fairness
        self.counters = VirtualCounters(section.output_weight, section.slack_tokens)

    def notice_change(self) -> None:
        """Look at the queues soon: load or replicas have changed."""
        if self._queues:
            self._changed.set()

    def submit(self, query: Query, max_wait_s: float | None) -> Ticket:
        """Pick at once or queue; the ticket's `picked` tells.

        Raises:
            HeadraceError: no replica, no such model, or the queue is full.
        """
        ticket, now_s = Ticket(query, self), self._clock.now_s()
        try:
            choice = self._choose(query, now_s)
            if choice is not None:
                self._book(ticket, choice, now_s)
            else:
                self._enqueue(ticket, max_wait_s, now_s)
        except HeadraceError as error:
            self._metrics.refusals.labels(error.reason).inc()
            ticket.picked.cancel()
            raise
        return ticket

    def close(self, ticket: Ticket) -> None:
        """Take a ticket out of its queue or off its replica. Called by tickets."""
        if ticket.waiting is not None:
            self._leave_queue(ticket.waiting)
            ticket.waiting = None
        if ticket.guard is not None and ticket.guard.release():
            self._metrics.in_flight.set(self._loads.num_requests())
            self.notice_change()

    def started(
        self, query: Query, choice: Choice, guard: LoadGuard, message: PickProgress
    ) -> None:
        """Learn from a first token. Called by tickets."""
        chosen = choice.chosen
        guard.first_token(self._clock.now_s())
        self._metrics.predicted_tokens.inc(query.cached_tokens(chosen.hit_blocks))
        self._metrics.cached_tokens.inc(message.cached_tokens)
        if message.ttft_s > 0 and chosen.predicted_ttft_s > 0:
            self._metrics.ttft_error_ratio.observe(message.ttft_s / chosen.predicted_ttft_s)
            self._predictor.observe(chosen.key, chosen.predicted_ttft_s, message.ttft_s)
        self.notice_change()

    async def run(self) -> None:
        """Release waiting requests as replicas come free, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._time_to_next_pass_s()):
                    await self._changed.wait()
            self._changed.clear()
            self.release_all()
            await asyncio.sleep(_MIN_PASS_S)

    def release_all(self) -> None:
        """Make one pass over all queues."""
        now_s = self._clock.now_s()
        for queue in list(self._queues.values()):
            for one in queue.expired(now_s):
                self._fail(one, self._too_long())
            self._release(queue, now_s)

    def _time_to_next_pass_s(self) -> float | None:
        deadlines = [queue.next_deadline_s() for queue in self._queues.values()]
        first = min((one for one in deadlines if one is not None), default=None)
        return None if first is None else min(first - self._clock.now_s(), _IDLE_PASS_S)

    def _release(self, queue: ModelQueue, now_s: float) -> None:
        while True:
            failed: dict[Waiting, HeadraceError] = {}
            release = queue.next_release(partial(self._try_choose, now_s, failed), now_s)
            for one, error in failed.items():
                self._fail(one, error)
            if release is not None:
                self._leave_queue(release.waiting)
                release.waiting.on_leave(release.choice)
            elif not failed:
                return

    def _try_choose(
        self, now_s: float, failed: dict[Waiting, HeadraceError], one: Waiting
    ) -> Choice | None:
        try:
            return self._choose(one.query, now_s)
        except HeadraceError as error:
            failed[one] = error
            return None

    def _choose(self, query: Query, now_s: float) -> Choice | None:
        policy = self._policies.get(query.model)
        if policy is None:
            policy = self._file.make_policy(query.model, self._random)
        with self._metrics.decision_s.time():
            choice = self._pipeline.choose(query, policy, now_s)
        # Remembered only for models that exist: names come from callers.
        self._policies[query.model] = policy
        return choice

    def _book(self, ticket: Ticket, choice: Choice, arrived_s: float) -> None:
        query, chosen, now_s = ticket.query, choice.chosen, self._clock.now_s()
        guard = self._loads.book(
            chosen.key,
            query.chain,
            uncached_tokens=chosen.uncached_tokens,
            prompt_tokens=query.prompt_tokens,
            now_s=now_s,
        )
        ticket.queue_s = now_s - arrived_s
        self.counters.charge(query.tenant_id, prompt_tokens=chosen.uncached_tokens)
        self._mean_own_s += 0.05 * (chosen.own_s - self._mean_own_s)
        self._metrics.decisions.labels(choice.policy.name).inc()
        self._metrics.queue_s.observe(ticket.queue_s)
        self._metrics.in_flight.set(self._loads.num_requests())
        ticket.leave(choice, guard)

    def _enqueue(self, ticket: Ticket, max_wait_s: float | None, now_s: float) -> None:
        section = self._file.queue
        wait_s = section.max_wait_s if max_wait_s is None else min(max_wait_s, section.max_wait_s)

        def on_leave(outcome: Choice | Exception) -> None:
            if isinstance(outcome, Exception):
                ticket.leave(outcome)
            else:
                self._book(ticket, outcome, now_s)

        model = ticket.query.model
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = ModelQueue(self.counters, section.max_waiting_per_model)
        waiting = Waiting(ticket.query, now_s, now_s + wait_s, on_leave)
        try:
            victim = queue.add(waiting, self._retry_after_s())
        finally:
            self._tidy(model)
        ticket.waiting = waiting
        if victim is not None:
            victim.on_leave(self._full())
            self._metrics.refusals.labels(QueueFull.reason).inc()
        self._metrics.waiting.set(self._num_waiting())
        self._changed.set()

    def _fail(self, one: Waiting, error: HeadraceError) -> None:
        self._leave_queue(one)
        self._metrics.refusals.labels(error.reason).inc()
        one.on_leave(error)

    def _leave_queue(self, one: Waiting) -> None:
        queue = self._queues.get(one.query.model)
        if queue is not None:
            queue.remove(one)
            self._tidy(one.query.model)
        self._metrics.waiting.set(self._num_waiting())

    def _tidy(self, model: str) -> None:
        if not self._queues[model]:
            del self._queues[model]

    def _num_waiting(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def _retry_after_s(self) -> float:
        # About when half of those waiting will have gone.
        return min(max(self._num_waiting() * self._mean_own_s / 2, _MIN_RETRY_S), _MAX_RETRY_S)

    def _full(self) -> QueueFull:
        return QueueFull(
            "Too many requests wait for this model. Try again later.",
            retry_after_s=self._retry_after_s(),
        )

    def _too_long(self) -> QueueFull:
        return QueueFull(
            "No replica came free in time. Try again later.", retry_after_s=self._retry_after_s()
        )
