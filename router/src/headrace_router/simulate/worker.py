"""A simulated engine: continuous batching with chunked prefill over a paged cache.

As the real one: decoding streams first, then prompts in order of arrival, under one token budget
per step; the prefix is looked up when a prompt starts. Simpler than the real one: the KV of a
request's whole output is set aside when it starts, so nothing is ever preempted.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace_router.simulate.cost_model import CostModel
from headrace_router.simulate.events import EventQueue
from headrace_router.simulate.paged_cache import PagedCache

_RATE_STEPS = 64
_PURE_STEPS = 16
_MIN_RATED_TOKENS = 64


@dataclass(eq=False, slots=True)
class Job:
    """One request at a worker."""

    prompt_tokens: int
    output_tokens: int
    chain: tuple[int, ...]
    on_first_token: Callable[[Job], None] = field(repr=False)
    on_end: Callable[[Job], None] = field(repr=False)
    cached_tokens: int = 0
    num_computed: int = 0
    # Cached blocks in use, and blocks set aside.
    shared: list[int] = field(default_factory=list)
    num_reserved: int = 0


class Rate:
    """Tokens per second over the last steps."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._steps: deque[tuple[int, float]] = deque()
        self._tokens, self._seconds = 0, 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Note one step."""
        self._steps.append((tokens, seconds))
        self._tokens += tokens
        self._seconds += seconds
        if len(self._steps) > self._max_steps:
            tokens, seconds = self._steps.popleft()
            self._tokens -= tokens
            self._seconds -= seconds

    def tokens_per_s(self) -> float:
        """Return tokens over time; 0 before any step."""
        return self._tokens / self._seconds if self._steps else 0.0

    def means(self) -> tuple[float, float]:
        """Return tokens and seconds per step."""
        count = len(self._steps) or 1
        return self._tokens / count, self._seconds / count


class SimulatedWorker:
    """One engine.

    Args:
        name: worker id.
        events: time.
        costs: what steps cost.
        cache: its KV.
        block_tokens: tokens per block.
        chunk_tokens: most tokens per step.
        on_step: called after each step and after each arrival.
    """

    def __init__(
        self,
        name: str,
        events: EventQueue,
        costs: CostModel,
        cache: PagedCache,
        *,
        block_tokens: int,
        chunk_tokens: int,
        on_step: Callable[[SimulatedWorker], None],
    ) -> None:
        self.name, self.cache = name, cache
        self._events, self._costs = events, costs
        self._block_tokens, self._chunk_tokens = block_tokens, chunk_tokens
        self._on_step = on_step
        self._waiting: deque[Job] = deque()
        self._prefilling: deque[Job] = deque()
        # (decode step at which it ends, number, job)
        self._decoding: list[tuple[int, int, Job]] = []
        self._num_decode_steps = self._number = 0
        self._is_stepping = False
        self._prefill_rate, self._decode_rate = Rate(_RATE_STEPS), Rate(_RATE_STEPS)
        # Steps that only decoded.
        self.pure_decode = Rate(_PURE_STEPS)
        self.queued_prefill_tokens = self.context_tokens = 0
        self.busy_s = self.prefill_busy_s = 0.0

    @property
    def num_waiting(self) -> int:
        """Requests that have not started."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def running_tokens(self) -> int:
        """Tokens of running requests held in KV."""
        return self.context_tokens + sum(job.num_computed for job in self._prefilling)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Measured over the last steps; 0 = not measured."""
        return self._prefill_rate.tokens_per_s()

    @property
    def decode_tokens_per_s(self) -> float:
        """Measured over the last steps, all streams together; 0 = not measured."""
        return self._decode_rate.tokens_per_s()

    def submit(self, job: Job) -> None:
        """Take a request in."""
        self._waiting.append(job)
        self.queued_prefill_tokens += job.prompt_tokens
        if self._is_stepping:
            self._on_step(self)
        else:
            self._begin_step()

    def _begin_step(self) -> None:
        budget = self._chunk_tokens - len(self._decoding)
        chunks: list[tuple[Job, int]] = []
        prefill_s, idx = 0.0, 0
        while budget > 0 and (idx < len(self._prefilling) or self._try_start()):
            job = self._prefilling[idx]
            num_tokens = min(budget, job.prompt_tokens - job.num_computed)
            prefill_s += self._costs.prefill_s(job.num_computed, num_tokens)
            chunks.append((job, num_tokens))
            budget -= num_tokens
            idx += 1
        self._is_stepping = bool(chunks or self._decoding)
        self._on_step(self)
        if self._is_stepping:
            duration_s = self._costs.step_s(self.context_tokens, prefill_s)
            self.busy_s += duration_s
            self.prefill_busy_s += prefill_s
            self._events.after(duration_s, lambda: self._end_step(chunks, duration_s))

    def _try_start(self) -> bool:
        if not self._waiting:
            return False
        job = self._waiting[0]
        depth = self.cache.match(job.chain)
        total = -(-(job.prompt_tokens + job.output_tokens) // self._block_tokens)
        shared = list(job.chain[:depth])
        if not self.cache.try_reserve(shared, total - depth):
            return False
        self._waiting.popleft()
        job.shared, job.num_reserved = shared, total - depth
        job.cached_tokens = min(depth * self._block_tokens, job.prompt_tokens - 1)
        job.num_computed = job.cached_tokens
        self.queued_prefill_tokens -= job.cached_tokens
        self._prefilling.append(job)
        return True

    def _end_step(self, chunks: list[tuple[Job, int]], duration_s: float) -> None:
        num_decoded, num_prefilled = len(self._decoding), 0
        self._decode(num_decoded)
        for job, num_tokens in chunks:
            num_prefilled += num_tokens
            self._advance(job, num_tokens)
        self.queued_prefill_tokens -= num_prefilled
        if num_prefilled >= _MIN_RATED_TOKENS:
            self._prefill_rate.add(num_prefilled, duration_s)
        if num_decoded:
            self._decode_rate.add(num_decoded, duration_s)
            if not num_prefilled:
                self.pure_decode.add(num_decoded, duration_s)
        self._begin_step()

    def _decode(self, num_streams: int) -> None:
        self._num_decode_steps += 1
        self.context_tokens += num_streams
        while self._decoding and self._decoding[0][0] <= self._num_decode_steps:
            job = heapq.heappop(self._decoding)[2]
            self.context_tokens -= job.prompt_tokens + job.output_tokens - 1
            self._end(job)

    def _advance(self, job: Job, num_tokens: int) -> None:
        first = len(job.shared)
        job.num_computed += num_tokens
        for block in job.chain[first : job.num_computed // self._block_tokens]:
            if not self.cache.store(block):
                # Another request computed it meanwhile; the rest of this one stays private too.
                break
            job.shared.append(block)
            job.num_reserved -= 1
        if job.num_computed < job.prompt_tokens:
            return
        self._prefilling.remove(job)
        job.on_first_token(job)
        if job.output_tokens == 1:
            self._end(job)
            return
        self._number += 1
        end = self._num_decode_steps + job.output_tokens - 1
        heapq.heappush(self._decoding, (end, self._number, job))
        self.context_tokens += job.prompt_tokens

    def _end(self, job: Job) -> None:
        self.cache.release(job.shared, job.num_reserved)
        job.on_end(job)
