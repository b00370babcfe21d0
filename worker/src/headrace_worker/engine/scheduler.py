"""Which sequence computes how many tokens in the next step. Pure: no clock, no tensors, no threads.

Continuous batching with chunked prefill (Orca, OSDI 2022; Sarathi-Serve, arXiv 2403.02310): one
token budget per step, first one token for every sequence that decodes, then chunks of prompts. When
blocks run out, the sequence of the lowest class that arrived last is preempted: its blocks go back
(named ones stay cached) and its tokens are computed again later.

The queue is ordered by `arrival + wanted time to first token - class * ageing_s`: earliest deadline
first, and a class is worth that many seconds of waiting. So nothing starves, and the order never
changes while things wait. A request that does not fit may be passed by smaller ones, but only by a
few and not for long. While streams run, chunks of prompts are as small as these need (see pace).

Long because admission, growth, preemption and forks share the same books.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from headrace_common.blocks import ROOT, chain
from headrace_common.errors import ContextTooLong, QueueFull
from headrace_worker.engine.block_pool import OutOfBlocks
from headrace_worker.engine.pace import Pace
from headrace_worker.engine.prefix_cache import PrefixCache
from headrace_worker.engine.request import Finish, Request, Sequence, SequenceState

# Sequences behind one that does not fit which are looked at, and how long it may be passed.
MAX_SKIPPED = 8
MAX_PASSED_S = 2.0
# A request that was preempted this often is no longer preempted just to admit a higher class.
MAX_CLASS_PREEMPTIONS = 2
# Wanted time to first token of a request that does not say.
DEFAULT_TTFT_SLO_S = 5.0


@dataclass(frozen=True)
class SchedulerLimits:
    """Sizes that bound a step and the queue.

    Args:
        token_budget: most tokens in one step; at least `max_running`.
        max_running: most sequences in one step.
        max_waiting: most requests that wait to start.
        context_tokens: prompt and output of one sequence.
        block_size: tokens per block.
        ageing_s: seconds of waiting that one class of priority is worth.
        checks_books: debug mode: all invariants are checked after each step.
        slowdown_ratio: longest step while streams run, in steps without a prompt (see `Pace`).
    """

    token_budget: int
    max_running: int
    max_waiting: int
    context_tokens: int
    block_size: int = 16
    ageing_s: float = 10.0
    slowdown_ratio: float = 2.2
    checks_books: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.max_running <= self.token_budget:
            raise ValueError("max_running must be between 1 and token_budget")
        if self.slowdown_ratio < 1:
            raise ValueError("slowdown_ratio must be at least 1")


@dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence in one step: `token_ids[start:start + num_tokens]`.

    What it says holds for the step, also after the drawn token has been appended.

    Args:
        seq: whose tokens.
        start: place of the first.
        num_tokens: how many.
        gives_token: the last of the known tokens is computed, so that the next can be drawn.
        is_decode: it computes the last output token alone, not a part of a prompt or of output
            that is computed again.
    """

    seq: Sequence
    start: int
    num_tokens: int
    gives_token: bool
    is_decode: bool

    @classmethod
    def next_of(cls, seq: Sequence, num_tokens: int) -> Chunk:
        """Return the next *num_tokens* that a sequence computes."""
        start = seq.num_computed
        gives_token = start + num_tokens == seq.num_tokens
        is_decode = gives_token and num_tokens == 1 and start >= seq.num_prompt
        return cls(seq, start, num_tokens, gives_token, is_decode)


@dataclass
class StepPlan:
    """What one step computes, and what changed to make it possible."""

    chunks: list[Chunk]
    admitted: list[Sequence]
    preempted: list[Sequence]


@dataclass(frozen=True)
class Fork:
    """A choice that goes on from choice 0's prompt.

    `copy` names the block (source, target) to copy first.
    """

    seq: Sequence
    copy: tuple[int, int] | None


@dataclass
class _Step:
    """A plan in the making: first single tokens, then from what these leave, prompts."""

    budget: int
    # Of it, what prompts may take.
    prompt_budget: int = 0
    singles: dict[int, Chunk] = field(default_factory=dict)
    prompts: dict[int, Chunk] = field(default_factory=dict)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def chunks(self) -> list[Chunk]:
        return [*self.singles.values(), *self.prompts.values()]

    def take_single(self, seq: Sequence) -> None:
        self.budget -= 1
        self.singles[id(seq)] = Chunk.next_of(seq, 1)

    def take_prompt(self, seq: Sequence) -> None:
        num_tokens = min(self.prompt_budget, seq.num_uncomputed)
        self.prompt_budget -= num_tokens
        self.prompts[id(seq)] = Chunk.next_of(seq, num_tokens)

    def limit_prompts(self, most_tokens: int) -> None:
        self.prompt_budget = min(self.budget, most_tokens)

    def give_back(self, seq: Sequence) -> None:
        if self.singles.pop(id(seq), None) is not None:
            self.budget += 1
        prompt = self.prompts.pop(id(seq), None)
        if prompt is not None:
            self.prompt_budget += prompt.num_tokens
        if seq in self.admitted:
            self.admitted.remove(seq)


class Scheduler:
    """Owns the queues and, through the cache, every block. One thread only.

    Args:
        limits: sizes.
        cache: blocks and their names.
        pace: says how many prompt tokens the running streams bear; None = as many as fit.
    """

    def __init__(
        self, limits: SchedulerLimits, cache: PrefixCache, pace: Pace | None = None
    ) -> None:
        self._limits, self._cache, self._pool = limits, cache, cache.pool
        self._pace = pace
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._num_arrived = 0
        self.max_sequence_tokens = min(
            limits.context_tokens, cache.pool.num_blocks * limits.block_size
        )

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._waiting or self._running)

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences that wait, preempted ones included, the next one first."""
        return list(self._waiting)

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold blocks."""
        return list(self._running)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ContextTooLong: it can never be computed here.
            QueueFull: too many wait.
        """
        longest = max(
            seq.num_tokens for seq in request.sequences if seq.state is not SequenceState.FINISHED
        )
        if longest >= self.max_sequence_tokens:
            raise ContextTooLong(
                f"The prompt has {longest} tokens; prompt and output together may have "
                f"{self.max_sequence_tokens} here.",
                param="prompt_token_ids",
            )
        if self._num_requests_waiting() >= self._limits.max_waiting:
            raise QueueFull("This worker's queue is full.", retry_after_s=1.0)
        self._num_arrived += 1
        slo_s = DEFAULT_TTFT_SLO_S if request.ttft_slo_s is None else request.ttft_slo_s
        wanted_s = request.accepted_s + slo_s
        request.rank = (wanted_s - request.priority * self._limits.ageing_s, self._num_arrived)
        for seq in request.sequences:
            if self._may_fork_later(seq):
                seq.state = SequenceState.HELD
            elif seq.state is not SequenceState.FINISHED:
                self._enqueue(seq, SequenceState.WAITING)

    def plan(self, now_s: float) -> StepPlan:
        """Choose the next step's tokens and give them their blocks."""
        step = _Step(self._limits.token_budget)
        for seq in sorted(self._running, key=_rank):
            if seq.num_uncomputed == 1 and seq.state is SequenceState.RUNNING:
                self._plan_single(seq, step)
        step.limit_prompts(self._most_prompt_tokens(step))
        for seq in sorted(self._running, key=_rank):
            if seq.num_uncomputed > 1 and step.prompt_budget > 0:
                step.take_prompt(seq)
        self._admit_waiting(step, now_s)
        if not step.chunks and self._waiting and self._cache.try_reclaim():
            self._admit_waiting(step, now_s)
        return StepPlan(step.chunks, step.admitted, step.preempted)

    def computed(self, chunk: Chunk) -> None:
        """Note that a chunk's KV lies in its blocks and name the blocks that are now full."""
        seq, first = chunk.seq, chunk.seq.num_named_blocks
        seq.num_computed = chunk.start + chunk.num_tokens
        num_full = seq.num_computed // self._limits.block_size
        if num_full > first:
            hashes = self._hashes(seq, num_full)
            self._cache.register(seq.block_table, first, hashes[first:])
            seq.num_named_blocks = num_full

    def fork(self, leader: Sequence) -> list[Fork]:
        """Let the held choices go on from *leader*'s prompt, which has just been computed.

        Full blocks are shared, a partial last one is copied. A choice for which there is no room
        now waits like any other and finds the full blocks in the cache.
        """
        forks = []
        for seq in leader.request.sequences:
            if seq.state is SequenceState.HELD:
                fork = self._fork_one(leader, seq)
                if fork is not None:
                    forks.append(fork)
        return forks

    def finish(self, seq: Sequence, why: Finish) -> None:
        """End a sequence, whatever it is doing, and give its blocks back."""
        if seq.state is SequenceState.FINISHED:
            return
        if seq.state is SequenceState.RUNNING:
            self._running.remove(seq)
            self._release(seq)
        elif seq.state in (SequenceState.WAITING, SequenceState.PREEMPTED):
            self._waiting.remove(seq)
        seq.state, seq.finish = SequenceState.FINISHED, why

    def abort(self, request: Request) -> None:
        """End all choices of a request. Idempotent."""
        for seq in request.sequences:
            self.finish(seq, Finish.ABORT)

    def _plan_single(self, seq: Sequence, step: _Step) -> None:
        num_blocks = self._num_blocks(seq.num_tokens)
        while len(seq.block_table) < num_blocks:
            try:
                seq.block_table.append(self._pool.allocate())
            except OutOfBlocks:
                if self._cache.try_reclaim():
                    continue
                victim = max(self._running, key=_victim_order)
                self._preempt(victim, step)
                if victim is seq:
                    return
        step.take_single(seq)

    def _most_prompt_tokens(self, step: _Step) -> int:
        streams = [it.seq.request for it in step.singles.values() if it.is_decode]
        return step.budget if self._pace is None else self._pace.most_prompt_tokens(streams)

    def _admit_waiting(self, step: _Step, now_s: float) -> None:
        num_skipped = 0
        for seq in list(self._waiting):
            if step.prompt_budget <= 0 or seq in step.preempted:
                return
            if self._try_admit(seq) or (self._make_room(seq, step) and self._try_admit(seq)):
                step.admitted.append(seq)
                self._start(seq, now_s)
                step.take_prompt(seq)
                continue
            num_skipped += 1
            waited_s = now_s - seq.request.accepted_s
            if num_skipped > MAX_SKIPPED or waited_s > MAX_PASSED_S:
                return

    def _try_admit(self, seq: Sequence) -> bool:
        if len(self._running) >= self._limits.max_running:
            return False
        hits = self._match(seq)
        num_new = self._num_blocks(seq.num_tokens) - len(hits)
        num_idle_hits = sum(self._pool.num_references(block_id) == 0 for block_id in hits)
        # One block for each running sequence stays free, or the newcomer would soon be preempted.
        reserve = len(self._running)
        if num_new + num_idle_hits + reserve > self._pool.num_available:
            return False
        for block_id in hits:
            self._pool.share(block_id)
        seq.block_table = [*hits, *(self._pool.allocate() for _ in range(num_new))]
        seq.num_named_blocks = len(hits)
        seq.num_computed = len(hits) * self._limits.block_size
        self._waiting.remove(seq)
        self._running.append(seq)
        seq.state = SequenceState.RUNNING
        return True

    def _match(self, seq: Sequence) -> list[int]:
        if not seq.request.reuses_prefix:
            return []
        return self._cache.match(self._hashes(seq, self._num_reusable(seq.num_tokens)))

    def _hashes(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """Return the hashes of the leading full blocks; each is computed only once."""
        known, size = seq.block_hashes, self._limits.block_size
        if len(known) < num_blocks:
            tokens = seq.token_ids[len(known) * size : num_blocks * size]
            parent = known[-1] if known else ROOT
            known.extend(chain(seq.request.chain_key, tokens, size, parent))
        return known[:num_blocks]

    def _num_reusable(self, num_tokens: int) -> int:
        # The last token is always computed: its logits are needed.
        return (num_tokens - 1) // self._limits.block_size

    def _start(self, seq: Sequence, now_s: float) -> None:
        request = seq.request
        if request.scheduled_s is None:
            request.scheduled_s = now_s
            most = self._num_reusable(seq.num_prompt) * self._limits.block_size
            request.cached_tokens = max(0, min(seq.num_computed, most) - request.handed_tokens)

    def _make_room(self, seq: Sequence, step: _Step) -> bool:
        """Preempt running sequences of a lower class, if that is enough to admit *seq*."""
        lower = [
            s
            for s in self._running
            if s.request.priority < seq.request.priority
            and s.request.num_preemptions < MAX_CLASS_PREEMPTIONS
        ]
        freed = sum(
            self._pool.num_references(block_id) == 1 for s in lower for block_id in s.block_table
        )
        needed = self._num_blocks(seq.num_tokens) + len(self._running) - len(lower)
        if not lower or needed > self._pool.num_available + freed:
            return False
        for victim in sorted(lower, key=_victim_order, reverse=True):
            self._preempt(victim, step)
            if self._has_room(seq):
                return True
        return True

    def _has_room(self, seq: Sequence) -> bool:
        num_running = len(self._running)
        needed = self._num_blocks(seq.num_tokens) + num_running
        return num_running < self._limits.max_running and needed <= self._pool.num_available

    def _preempt(self, seq: Sequence, step: _Step) -> None:
        step.give_back(seq)
        step.preempted.append(seq)
        self._running.remove(seq)
        self._release(seq)
        seq.request.num_preemptions += 1
        self._enqueue(seq, SequenceState.PREEMPTED)

    def _release(self, seq: Sequence) -> None:
        # Last block first, so that in the order of eviction leaves stand before their parents.
        for block_id in reversed(seq.block_table):
            self._pool.release(block_id)
        seq.block_table, seq.num_named_blocks, seq.num_computed = [], 0, 0

    def _fork_one(self, leader: Sequence, seq: Sequence) -> Fork | None:
        num_full, rest = divmod(leader.num_prompt, self._limits.block_size)
        no_room = len(self._running) >= self._limits.max_running
        if no_room or (rest and self._pool.num_available == 0):
            self._enqueue(seq, SequenceState.WAITING)
            return None
        seq.block_table = leader.block_table[:num_full]
        for block_id in seq.block_table:
            self._pool.share(block_id)
        copy = None
        if rest:
            seq.block_table.append(self._pool.allocate())
            copy = (leader.block_table[num_full], seq.block_table[num_full])
        seq.block_hashes = leader.block_hashes[:num_full]
        seq.num_named_blocks = num_full
        seq.num_computed = leader.num_prompt
        seq.state = SequenceState.RUNNING
        self._running.append(seq)
        return Fork(seq, copy)

    def _enqueue(self, seq: Sequence, state: SequenceState) -> None:
        seq.state = state
        insort(self._waiting, seq, key=_rank)

    def _num_requests_waiting(self) -> int:
        return len({id(seq.request) for seq in self._waiting if seq.state is SequenceState.WAITING})

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._limits.block_size)

    @staticmethod
    def _may_fork_later(seq: Sequence) -> bool:
        leader = seq.request.sequences[0]
        return (
            seq is not leader
            and seq.num_output == 0
            and leader.num_output == 0
            and leader.state is not SequenceState.FINISHED
        )


def _rank(seq: Sequence) -> tuple[float, int, int]:
    return (*seq.request.rank, seq.choice_idx)


def _victim_order(seq: Sequence) -> tuple[int, float, int, int]:
    """Largest = first to be preempted: lowest class, then latest arrival, then last choice."""
    request = seq.request
    return (-request.priority, request.accepted_s, request.rank[1], seq.choice_idx)
