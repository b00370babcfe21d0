"""A simulated fleet: workers, the news they send to the routers, and the way of each request."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import partial
from random import Random

from headrace_common.errors import HeadraceError
from headrace_common.kv_index import ReplicaKey
from headrace_contracts.cache_index.v1.cache_index_pb2 import IndexDelta
from headrace_contracts.router.v1.router_pb2 import PickProgress
from headrace_contracts.worker.v1.worker_pb2 import WORKER_STATE_READY, LoadReport
from headrace_router.bids import Bid, Bids
from headrace_router.candidate import Query
from headrace_router.desk import Outcome, Ticket
from headrace_router.load_guard import LoadGuard
from headrace_router.simulate.events import EventQueue
from headrace_router.simulate.paged_cache import PagedCache
from headrace_router.simulate.router import MODEL, SimulatedRouter
from headrace_router.simulate.scenario import Scenario
from headrace_router.simulate.trace import TraceRequest
from headrace_router.simulate.worker import Job, SimulatedWorker

# As a worker reports: at each change of its requests, at most and at least so often.
_MIN_REPORT_GAP_S = 0.02
_MAX_REPORT_GAP_S = 0.25


@dataclass(slots=True)
class Served:
    """What became of one request."""

    request: TraceRequest
    # None = it was refused.
    ttft_s: float | None = None
    queue_s: float = 0.0
    cached_tokens: int = 0
    predicted_cached_tokens: int = 0
    worker: str = ""


class _News:
    """What one worker tells the routers: load reports and changes of its cache."""

    def __init__(self, key: ReplicaKey, fleet: SimulatedFleet) -> None:
        self.key, self._fleet = key, fleet
        self.seq = 0
        self._told: tuple[int, int, int] | None = None
        self._told_at_s = float("-inf")
        self._is_due = False

    def after_step(self, worker: SimulatedWorker) -> None:
        added, removed = worker.cache.take_changes()
        if added or removed:
            self.seq += 1
            delta = IndexDelta(
                replica=self.key.to_ref(),
                seq=self.seq,
                model=MODEL,
                added=struct.pack(f"<{len(added)}Q", *added),
                removed=struct.pack(f"<{len(removed)}Q", *removed),
            )
            self._fleet.publish(self, delta)
        now_s = self._fleet.events.now_s()
        state = (worker.num_waiting, worker.num_running, worker.queued_prefill_tokens)
        gap_s = _MIN_REPORT_GAP_S if state != self._told else _MAX_REPORT_GAP_S
        if not self._is_due and now_s - self._told_at_s >= gap_s:
            self.report(worker)
        elif not self._is_due and state != self._told:
            self._is_due = True
            when_s = self._told_at_s + _MIN_REPORT_GAP_S
            self._fleet.events.at(when_s, lambda: self.report(worker))

    def report(self, worker: SimulatedWorker) -> None:
        self._is_due = False
        self._told_at_s = self._fleet.events.now_s()
        self._told = (worker.num_waiting, worker.num_running, worker.queued_prefill_tokens)
        self._fleet.tell(self.key, worker)


class SimulatedFleet:
    """Everything between a request's arrival and its end.

    Args:
        scenario: the set-up.
        policy: name of the policy.
        events: time.
    """

    def __init__(self, scenario: Scenario, policy: str, events: EventQueue) -> None:
        self._scenario, self.events = scenario, events
        self._random = Random(scenario.seed)  # noqa: S311 - a simulation
        self.workers: dict[str, SimulatedWorker] = {}
        news = [_News(ReplicaKey(f"w{idx}", 1), self) for idx in range(scenario.num_workers)]
        for one in news:
            self.workers[one.key.worker_id] = SimulatedWorker(
                one.key.worker_id,
                events,
                scenario.costs,
                PagedCache(scenario.kv_tokens // scenario.block_tokens),
                block_tokens=scenario.block_tokens,
                chunk_tokens=scenario.chunk_tokens,
                on_step=one.after_step,
            )
        policy_file = scenario.policies(policy)
        self.routers = [
            SimulatedRouter(events, [one.key for one in news], policy_file, scenario.seed + idx)
            for idx in range(scenario.num_routers)
        ]
        self._bids: dict[str, Bids] = {}
        if scenario.share_bookings and scenario.num_routers > 1:
            self._let_bid()
        for one in news:
            self._beat(one)
        self.num_open = 0

    def arrive(self, request: TraceRequest) -> Served:
        """Send a request to one of the routers; what becomes of it shows later."""
        served = Served(request)
        router = self._random.choice(self.routers)
        self.num_open += 1
        _Journey(self, router, served).start(self._scenario)
        return served

    def publish(self, news: _News, delta: IndexDelta) -> None:
        """Send a change of a cache to every router; some are lost on the way."""
        cache = self.workers[news.key.worker_id].cache
        for router in self.routers:
            if self._random.random() < self._scenario.event_loss_ratio:
                continue
            self.events.after(
                self._scenario.event_delay_s,
                partial(
                    router.take_delta,
                    news.key,
                    delta,
                    lambda: (news.seq, cache.hashes()),
                    self._scenario.resync_delay_s,
                ),
            )

    def tell(self, key: ReplicaKey, worker: SimulatedWorker) -> None:
        """Send a load report to every router."""
        scenario = self._scenario
        streams, step_s = worker.pure_decode.means()
        report = LoadReport(
            replica=key.to_ref(),
            state=WORKER_STATE_READY,
            num_waiting=worker.num_waiting,
            num_running=worker.num_running,
            queued_prefill_tokens=worker.queued_prefill_tokens,
            running_tokens=worker.running_tokens,
            kv_used_tokens=worker.cache.num_used * scenario.block_tokens,
            kv_capacity_tokens=worker.cache.capacity_blocks * scenario.block_tokens,
            prefill_tokens_per_s=worker.prefill_tokens_per_s,
            decode_tokens_per_s=worker.decode_tokens_per_s,
            decode_step_s=step_s,
            decode_step_streams=streams,
        )
        for router in self.routers:
            self.events.after(scenario.network_delay_s, partial(router.take_report, key, report))

    def share(self, router: SimulatedRouter, journey: _Journey) -> None:
        """Tell the other routers of a decision."""
        if self._scenario.share_bookings:
            for other in self.routers:
                if other is not router:
                    self.events.after(
                        self._scenario.booking_delay_s, partial(journey.book_at, other)
                    )

    def _let_bid(self) -> None:
        """Let the routers bid against one another for each opening."""
        for idx, router in enumerate(self.routers):
            name = f"r{idx}"
            self._bids[name] = Bids(name, self.events, lambda: True, partial(self._tell_bid, name))
            router.desk.bid(self._bids[name])

    def _tell_bid(self, name: str, replica: ReplicaKey, bid: Bid | None) -> None:
        for other, bids in self._bids.items():
            if other != name:
                hear = partial(bids.hear, name, replica, bid)
                self.events.after(self._scenario.booking_delay_s, hear)

    def dispatch(self, worker_id: str, job: Job) -> None:
        """Send a request to its worker."""
        self.events.after(
            self._scenario.network_delay_s, partial(self.workers[worker_id].submit, job)
        )

    def later(self, what: partial[None]) -> None:
        """Do something one network delay later."""
        self.events.after(self._scenario.network_delay_s, what)

    def _beat(self, news: _News) -> None:
        """Report also when nothing happens, for ever."""
        news.report(self.workers[news.key.worker_id])
        self.events.after(_MAX_REPORT_GAP_S * 4, partial(self._beat, news))


class _Journey:
    """One request's way, from its router to its end."""

    def __init__(self, fleet: SimulatedFleet, router: SimulatedRouter, served: Served) -> None:
        self._fleet, self._router, self._served = fleet, router, served
        self._arrived_s = self._dispatched_s = fleet.events.now_s()
        self._ticket: Ticket | None = None
        self._copies: list[LoadGuard] = []
        self._is_started = self._is_over = False
        self._uncached_tokens = 0
        self._key: ReplicaKey | None = None

    def start(self, scenario: Scenario) -> None:
        request = self._served.request
        query = Query(
            request_id=request.request_id,
            model=MODEL,
            chain=request.chain,
            block_size_tokens=scenario.block_tokens,
            prompt_tokens=request.prompt_tokens,
            ttft_goal_s=scenario.goal_s(request.prompt_tokens) if scenario.tell_goals else 0.0,
        )
        try:
            self._ticket = self._router.desk.submit(query, None, self._picked)
        except HeadraceError:
            self._fleet.num_open -= 1

    def book_at(self, router: SimulatedRouter) -> None:
        """Count this request at a router that did not decide it."""
        if self._is_over or self._key is None:
            return
        copy = router.loads.book(
            self._key,
            self._served.request.chain,
            uncached_tokens=self._uncached_tokens,
            prompt_tokens=self._served.request.prompt_tokens,
            now_s=self._fleet.events.now_s(),
        )
        if self._is_started:
            copy.first_token(self._fleet.events.now_s())
        self._copies.append(copy)

    def _picked(self, outcome: Outcome) -> None:
        if isinstance(outcome, HeadraceError):
            self._fleet.num_open -= 1
            return
        now_s, request, chosen = self._fleet.events.now_s(), self._served.request, outcome.chosen
        self._dispatched_s, self._key = now_s, chosen.key
        self._uncached_tokens = chosen.uncached_tokens
        self._served.queue_s = now_s - self._arrived_s
        self._served.worker = chosen.key.worker_id
        self._served.predicted_cached_tokens = request.prompt_tokens - chosen.uncached_tokens
        job = Job(
            request.prompt_tokens,
            request.output_tokens,
            request.chain,
            self._first_token,
            self._end,
        )
        self._fleet.dispatch(chosen.key.worker_id, job)
        self._fleet.share(self._router, self)

    def _first_token(self, job: Job) -> None:
        now_s = self._fleet.events.now_s()
        self._served.ttft_s = now_s - self._arrived_s
        self._served.cached_tokens = job.cached_tokens
        message = PickProgress(
            first_token=True, cached_tokens=job.cached_tokens, ttft_s=now_s - self._dispatched_s
        )
        self._fleet.later(partial(self._tell_first_token, message))

    def _tell_first_token(self, message: PickProgress) -> None:
        self._is_started = True
        if self._ticket is not None:
            self._ticket.progress(message)
        for copy in self._copies:
            copy.first_token(self._fleet.events.now_s())

    def _end(self, job: Job) -> None:
        self._fleet.num_open -= 1
        self._fleet.later(partial(self._give_back, job.output_tokens))

    def _give_back(self, output_tokens: int) -> None:
        self._is_over = True
        if self._ticket is not None:
            self._ticket.progress(PickProgress(output_tokens=output_tokens))
            self._ticket.close()
        for copy in self._copies:
            copy.release()
