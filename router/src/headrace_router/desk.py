"""Pure: queues and picks, from a request's arrival to its end, on a clock that is handed in.

A newcomer that may go at once goes at once; it cannot overtake a waiting request that could have
gone, since those are released at every change of load or replicas. The service drives it from its
event loop (`dispatcher.py`), the simulator from its own time (`simulate/`).

Long because a ticket's way into a queue, onto a replica and off it shares one state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import TypeAlias

from headrace_common.clock import Clock
from headrace_common.errors import HeadraceError, QueueFull
from headrace_common.kv_index import ReplicaKey
from headrace_contracts.router.v1.router_pb2 import PickProgress
from headrace_router.bids import BID_TTL_S, Bid, Bids, unopposed
from headrace_router.candidate import BATCH, Query
from headrace_router.decode_prediction import DecodePredictor
from headrace_router.fairness import VirtualCounters
from headrace_router.fleet_view import FleetView
from headrace_router.load_guard import LoadBook, LoadGuard
from headrace_router.metrics import RouterMetrics
from headrace_router.pairs import bookings, find_pair, tie
from headrace_router.pick import Choice, Pipeline
from headrace_router.policies.policy import Policy
from headrace_router.policy_file import PolicyFile
from headrace_router.prediction import PrefillPredictor
from headrace_router.queue import ModelQueue, Release, Waiting
from headrace_router.shadow import Shadow

_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 30.0
# A waiting request is looked up in the index again after this time; what the desk itself sends
# somewhere counts at once.
_HITS_TTL_S = 0.1
# A shorter prefill takes as long as the step that it shares, and says nothing about its rate.
_MIN_TAUGHT_TOKENS = 64

Outcome: TypeAlias = Choice | HeadraceError


class Ticket:
    """A request's place: first in a queue, then on a replica. `close` gives back whichever it has.

    Args:
        query: the request.
        desk: who keeps the queues.
        on_outcome: told once which replica it got, or why none; not called after `close`.
    """

    def __init__(self, query: Query, desk: PickDesk, on_outcome: Callable[[Outcome], None]) -> None:
        self.query, self._desk, self._on_outcome = query, desk, on_outcome
        self.waiting: Waiting | None = None
        self.guard: LoadGuard | None = None
        self.queue_s = 0.0
        self._choice: Choice | None = None
        self._is_started, self._output_tokens = False, 0

    def leave(self, outcome: Outcome, guard: LoadGuard | None = None) -> None:
        """Take the queue's verdict. Called by the desk."""
        self.waiting, self.guard = None, guard
        if not isinstance(outcome, HeadraceError):
            self._choice = outcome
        self._on_outcome(outcome)

    def progress(self, message: PickProgress) -> None:
        """Take a report of how the request goes on."""
        if self.guard is None or self._choice is None:
            return
        if message.first_token and not self._is_started:
            self._is_started = True
            self._desk.started(self.query, self._choice, self.guard, message)
        if message.failed_reason:
            self._desk.failed(self.guard)
        fresh = message.output_tokens - self._output_tokens
        if fresh > 0:
            self._output_tokens = message.output_tokens
            self.guard.add_output(fresh)
            self._desk.counters.charge(self.query.tenant_id, output_tokens=fresh)

    def close(self) -> None:
        """Leave the queue or give the load back, once. Idempotent."""
        self._desk.close(self, self._output_tokens)


class PickDesk:
    """Owns the queues of all models. Belongs to one thread.

    Args:
        pipeline: how a replica is chosen.
        loads: where decisions are booked.
        predictor: learns from what really happened to prefills.
        decode: learns how long outputs are.
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
        decode: DecodePredictor,
        policy_file: PolicyFile,
        clock: Clock,
        random: Random,
        metrics: RouterMetrics,
    ) -> None:
        self._pipeline, self._loads = pipeline, loads
        self._predictor, self._decode = predictor, decode
        self._clock, self._random, self._metrics = clock, random, metrics
        self._shadow = Shadow(metrics)
        self._queues: dict[str, ModelQueue] = {}
        self._policies: dict[str, tuple[Policy, Policy | None]] = {}
        self._mean_own_s = 0.1
        self._listener: Callable[[], None] = lambda: None
        self._on_failed: Callable[[LoadGuard], None] = lambda _: None
        self._bids = unopposed(clock)
        # Up to then some newcomer waits for others of the same moment.
        self._gather_until_s = 0.0
        section = policy_file.fairness
        self.counters = VirtualCounters(section.output_weight, section.slack_tokens)
        self._file = policy_file

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call *listener* when a pass over the queues may release something."""
        self._listener = listener

    def bid(self, bids: Bids) -> None:
        """Bid against other routers from now on."""
        self._bids = bids

    def use(self, policy_file: PolicyFile) -> None:
        """Go on by another policy file. Waiting requests stay; bounds count for newcomers."""
        self._file = policy_file
        self._policies.clear()
        section = policy_file.fairness
        self.counters.weigh(section.output_weight, section.slack_tokens)
        for queue in self._queues.values():
            queue.use(policy_file.queue)
        self.notice_change()

    def notice_change(self) -> None:
        """Look at the queues soon: load or replicas have changed."""
        if self._queues:
            self._listener()

    def submit(
        self, query: Query, max_wait_s: float | None, on_outcome: Callable[[Outcome], None]
    ) -> Ticket:
        """Pick at once or queue.

        Args:
            query: the request.
            max_wait_s: longest wait; None = the file's.
            on_outcome: told which replica it got, at once or later.

        Raises:
            HeadraceError: no replica, no such model, or the queue is full.
        """
        ticket, now_s = Ticket(query, self, on_outcome), self._clock.now_s()
        try:
            view = self._pipeline.view(query.model, now_s)
            choice = self._choose(query, view)
            if choice is None:
                self._admit(query, view)
                self._enqueue(ticket, max_wait_s, now_s, 0.0)
            elif self._must_queue(query, choice, max_wait_s):
                gather_s = choice.policy.gather_s(choice.chosen)
                self._enqueue(ticket, max_wait_s, now_s, gather_s)
            else:
                self._book(ticket, choice, now_s)
        except HeadraceError as error:
            self._metrics.refusals.labels(error.reason).inc()
            raise
        return ticket

    def close(self, ticket: Ticket, output_tokens: int) -> None:
        """Take a ticket out of its queue or off its replica. Called by tickets."""
        if ticket.waiting is not None:
            self._leave_queue(ticket.waiting)
            ticket.waiting = None
        if ticket.guard is not None and ticket.guard.release():
            if output_tokens:
                self._decode.observe_output(ticket.query.model, output_tokens)
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
        if message.ttft_s > 0 and choice.predicted_ttft_s > 0:
            self._metrics.ttft_error_ratio.observe(message.ttft_s / choice.predicted_ttft_s)
            if chosen.uncached_tokens >= _MIN_TAUGHT_TOKENS and choice.pair is None:
                self._predictor.observe(chosen.key, chosen.predicted_ttft_s, message.ttft_s)
        self.notice_change()

    def watch_failures(self, listener: Callable[[LoadGuard], None]) -> None:
        """Let *listener* hear of each request that failed on its replica."""
        self._on_failed = listener

    def failed(self, guard: LoadGuard) -> None:
        """A request failed on its replica. Called by tickets."""
        self._on_failed(guard)
        self.notice_change()

    def release_all(self) -> None:
        """Make one pass over all queues."""
        now_s = self._clock.now_s()
        for queue in list(self._queues.values()):
            for one in queue.expired(now_s):
                self._fail(one, self._too_long())
            for one in queue.hopeless(now_s):
                self._fail(one, self._full())
            self._release(queue, now_s)

    def next_deadline_s(self) -> float | None:
        """Return when the next waiting request must be given up; None = nobody waits."""
        deadlines = [queue.next_deadline_s() for queue in self._queues.values()]
        return min((one for one in deadlines if one is not None), default=None)

    def next_look_s(self) -> float | None:
        """Return the time until a bid is decided or newcomers have gathered; None = neither."""
        bid_s, gather_s = self._bids.next_s(), self._gather_until_s - self._clock.now_s()
        if gather_s <= 0:
            return bid_s
        return gather_s if bid_s is None else min(gather_s, bid_s)

    def num_waiting(self) -> int:
        """Count the requests in all queues."""
        return sum(len(queue) for queue in self._queues.values())

    def _release(self, queue: ModelQueue, now_s: float) -> None:
        if not queue:
            return
        view = self._pipeline.view(queue.model, now_s)
        policy, _ = self._policies_of(queue.model)
        while True:
            if not view.is_hopeless() and not policy.may_release(view):
                return
            failed: dict[Waiting, HeadraceError] = {}
            view.forget_queue()
            release = queue.next_release(partial(self._try_choose, view, failed), now_s)
            for one, error in failed.items():
                self._fail(one, error)
            if release is not None and not self._wins(release, now_s):
                view.withhold(release.choice.chosen.key)
            elif release is not None:
                queue.note_turn(release.waiting, now_s)
                self._leave_queue(release.waiting)
                release.waiting.on_leave(release.choice)
                key = release.choice.chosen.key
                self._pipeline.mend(view, key)
                self._note_coming(queue, view, key, release.waiting.query.chain)
            elif not failed:
                return

    def _must_queue(self, query: Query, choice: Choice, max_wait_s: float | None) -> bool:
        """Whether a newcomer queues although a replica is open; nobody waits for an idle one."""
        is_hasty = max_wait_s is not None and max_wait_s <= BID_TTL_S
        if is_hasty or not self._file.queue.max_waiting_per_model:
            return False
        if choice.policy.gather_s(choice.chosen):
            return True
        if (queue := self._queues.get(query.model)) is not None:
            # Whose turn it is among tenants, the queue says.
            return queue.others_wait(query) or self._bids.is_contested(is_queueing=True)
        return choice.chosen.num_requests > 0 and self._bids.is_contested(is_queueing=False)

    def _wins(self, release: Release, now_s: float) -> bool:
        one, choice = release.waiting, release.choice
        urgency = choice.policy.urgency(choice.chosen, one.waited_s(now_s))
        return self._bids.wins(choice.chosen.key, one, Bid(-one.priority, urgency))

    def _try_choose(
        self, view: FleetView, failed: dict[Waiting, HeadraceError], one: Waiting
    ) -> Choice | None:
        is_known = one.hits_version == view.version
        if not is_known or view.now_s - one.hits_at_s > _HITS_TTL_S:
            one.hits = self._pipeline.hits(one.query, view)
            one.hits_version, one.hits_at_s = view.version, view.now_s
        policy, _ = self._policies_of(one.query.model)
        if view.now_s < one.gather_until_s:
            return None
        outlook = policy.outlook(one.query, view, one.hits)
        choice = None
        try:
            if not outlook.must_wait:
                choice = self._choose(one.query, view, one.hits)
        except HeadraceError as error:
            failed[one] = error
        view.queue_up(outlook)
        return None if choice is None or choice.chosen.is_withheld else choice

    def _note_coming(
        self, queue: ModelQueue, view: FleetView, key: ReplicaKey, chain: Sequence[int]
    ) -> None:
        """Count blocks that were just sent on their way as cached, for those who wait."""
        idx = next(i for i, one in enumerate(view.replicas) if one.replica.key == key)
        for one in queue:
            if one.hits_version == view.version:
                depth, own = one.hits[idx], one.query.chain
                while depth < len(chain) and depth < len(own) and chain[depth] == own[depth]:
                    depth += 1
                one.hits[idx] = depth

    def _choose(
        self, query: Query, view: FleetView, hits: Sequence[int] | None = None
    ) -> Choice | None:
        policy, _ = pair = self._policies_of(query.model)
        with self._metrics.decision_s.time():
            choice = self._pipeline.choose(query, policy, view, hits)
        # Remembered only for models that exist: names come from callers.
        self._policies[query.model] = pair
        return choice

    def _policies_of(self, model: str) -> tuple[Policy, Policy | None]:
        known = self._policies.get(model)
        if known is not None:
            return known
        return (
            self._file.make_policy(model, self._random),
            self._file.make_shadow(model, self._random),
        )

    def _book(self, ticket: Ticket, choice: Choice, arrived_s: float) -> None:
        query, chosen, now_s = ticket.query, choice.chosen, self._clock.now_s()
        _, shadow = self._policies_of(query.model)
        if shadow is not None:
            self._shadow.compare(query, choice, shadow)
        choice.pair = find_pair(query, chosen, choice.candidates, self._file.pairs.rules())
        self._metrics.pairs.labels("direct" if choice.pair is None else "pair").inc()
        guards = [
            self._loads.book(
                one.replica,
                query.chain,
                uncached_tokens=one.uncached_tokens,
                prompt_tokens=one.prompt_tokens,
                now_s=now_s,
            )
            for one in bookings(query, chosen, choice.pair)
        ]
        guard = tie(guards)
        ticket.queue_s = now_s - arrived_s
        self.counters.charge(query.tenant_id, prompt_tokens=chosen.uncached_tokens)
        self._mean_own_s += 0.05 * (chosen.own_s - self._mean_own_s)
        self._metrics.decisions.labels(choice.policy.name).inc()
        self._metrics.queue_s.observe(ticket.queue_s)
        self._metrics.in_flight.set(self._loads.num_requests())
        ticket.leave(choice, guard)

    def _admit(self, query: Query, view: FleetView) -> None:
        """Refuse batch traffic that would wait longer than it may; the rest queues.

        Raises:
            QueueFull: it is better sent again later.
        """
        limit_s = self._file.queue.max_batch_ttft_s
        if query.priority != BATCH or not limit_s:
            return
        waiting_s = self.num_waiting() * self._mean_own_s / max(len(view.replicas), 1)
        least_backlog_s = view.least_backlog_s()
        predicted_s = waiting_s + (0.0 if least_backlog_s == float("inf") else least_backlog_s)
        if predicted_s > limit_s:
            raise QueueFull(
                "Batch requests cannot be served in time now. Try again later.",
                retry_after_s=min(max(predicted_s - limit_s, _MIN_RETRY_S), _MAX_RETRY_S),
            )

    def _enqueue(
        self, ticket: Ticket, max_wait_s: float | None, now_s: float, gather_s: float
    ) -> None:
        section = self._file.queue
        wait_s = section.max_wait_s if max_wait_s is None else min(max_wait_s, section.max_wait_s)

        def on_leave(outcome: Outcome) -> None:
            if isinstance(outcome, HeadraceError):
                ticket.leave(outcome)
            else:
                self._book(ticket, outcome, now_s)

        model = ticket.query.model
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = ModelQueue(model, self.counters, section)
        waiting = Waiting(ticket.query, now_s, now_s + wait_s, on_leave)
        if gather_s:
            waiting.gather_until_s = self._gather_until_s = now_s + gather_s
        try:
            victim = queue.add(waiting, self._retry_after_s())
        finally:
            self._tidy(model)
        ticket.waiting = waiting
        if victim is not None:
            self._bids.withdraw(victim)
            victim.on_leave(self._full())
            self._metrics.refusals.labels(QueueFull.reason).inc()
        self._metrics.waiting.set(self.num_waiting())
        self.notice_change()

    def _fail(self, one: Waiting, error: HeadraceError) -> None:
        self._leave_queue(one)
        self._metrics.refusals.labels(error.reason).inc()
        one.on_leave(error)

    def _leave_queue(self, one: Waiting) -> None:
        self._bids.withdraw(one)
        queue = self._queues.get(one.query.model)
        if queue is not None:
            queue.remove(one)
            self._tidy(one.query.model)
        self._metrics.waiting.set(self.num_waiting())

    def _tidy(self, model: str) -> None:
        if not self._queues[model]:
            del self._queues[model]

    def _retry_after_s(self) -> float:
        # About when half of those waiting will have gone.
        return min(max(self.num_waiting() * self._mean_own_s / 2, _MIN_RETRY_S), _MAX_RETRY_S)

    def _full(self) -> QueueFull:
        return QueueFull(
            "Too many requests wait for this model. Try again later.",
            retry_after_s=self._retry_after_s(),
        )

    def _too_long(self) -> QueueFull:
        return QueueFull(
            "No replica came free in time. Try again later.", retry_after_s=self._retry_after_s()
        )
