"""The loop: take commands, plan, run the model, draw tokens, hand them out. On a thread of its own.

Nothing that a request contains may end the loop: an exception in a step fails the requests of that
step, gives their blocks back, and the loop goes on. An abort takes effect before the next step.

Long because the loop's one state is shared by all that a step does.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace_common.awake import AwakeClock
from headrace_common.clock import Clock
from headrace_common.errors import HeadraceError, Internal
from headrace_worker.engine.block_events import BlockEventLog
from headrace_worker.engine.choice import Choice
from headrace_worker.engine.invariants import check_books
from headrace_worker.engine.load import EngineLoad, StepFacts
from headrace_worker.engine.output import RequestOutput, Sink, Times, Usage
from headrace_worker.engine.pace import Pace
from headrace_worker.engine.pooling import Pooler
from headrace_worker.engine.prefix_cache import PrefixCache
from headrace_worker.engine.profile import NoTimeline, Timeline
from headrace_worker.engine.rates import StepRates
from headrace_worker.engine.request import Finish, Request, Sequence, SequenceState
from headrace_worker.engine.scheduler import Chunk, Scheduler, SchedulerLimits, StepPlan
from headrace_worker.engine.token_table import TokenTable
from headrace_worker.model.batch import Row
from headrace_worker.sampling import Sampled, SampleSpec, token_logprobs

_log = logging.getLogger(__name__)

ENGINE_THREAD = "engine"
_JOIN_TIMEOUT_S, _JOIN_TRY_S = 5.0, 0.1


_Work = Callable[[PrefixCache], None]


class StepRunner(Protocol):
    """The model as the engine sees it; `headrace_worker.model.runner.ModelRunner` is one."""

    def forward(self, rows: list[Row]) -> Any:  # Any: (sum of num_logits, V) float32 tensor
        """Compute a step."""
        ...

    def hidden(self, rows: list[Row]) -> Any:  # Any: (sum of num_logits, E) float32 tensor
        """Compute a step up to the last norm, for embeddings."""
        ...

    def sample(self, logits: Any, specs: Rows[SampleSpec]) -> list[Sampled]:
        """Draw one token per row of *logits*, rows of what `forward` returned."""
        ...

    def copy_block(self, src: int, dst: int) -> None:
        """Copy one block's KV."""
        ...


@dataclass
class _Live:
    """A request that the engine has, with its choices and what it will say of its prompt."""

    request: Request
    choices: list[Choice] = field(default_factory=list)
    prompt_logprobs: list[Sampled] = field(default_factory=list)
    # How many of those there have been, told or not.
    num_prompt_scored: int = 0
    pooler: Pooler = field(default_factory=Pooler)
    said_started: bool = False


class Engine:
    """One engine on one device.

    Args:
        runner: the model; used on the engine's thread only.
        num_blocks: size of the KV pool.
        limits: sizes of steps and queue.
        table: bytes of tokens.
        events: where cache changes are noted.
        sink: gets all outputs of a step in one call, on the engine's thread.
        clock: time.
        on_step: gets the facts of each step, on the engine's thread.
    """

    def __init__(
        self,
        runner: StepRunner,
        num_blocks: int,
        limits: SchedulerLimits,
        table: TokenTable,
        events: BlockEventLog,
        sink: Sink,
        clock: Clock,
        on_step: Callable[[StepFacts], None],
    ) -> None:
        self._runner, self._table, self._events = runner, table, events
        self._sink, self._clock, self._on_step = sink, clock, on_step
        self._num_blocks, self._limits = num_blocks, limits
        self._cache = PrefixCache(num_blocks, events)
        self._pace = Pace(limits.slowdown_ratio, limits.token_budget)
        self._scheduler = Scheduler(limits, self._cache, self._pace)
        self._commands: queue.SimpleQueue[Request | int | _Work | None] = queue.SimpleQueue()
        self._live: dict[int, _Live] = {}
        self._outputs: dict[int, RequestOutput] = {}
        self._rates = StepRates()
        self._hit_tokens = self._query_tokens = self._num_preempted = 0
        self._awake = AwakeClock(clock)
        self._progress_s = self._awake.now_s()
        self._is_stopping = False
        self._timeline: Timeline | NoTimeline = NoTimeline()
        self._thread = threading.Thread(target=self._run, name=ENGINE_THREAD, daemon=True)
        # Replaced as a whole after each step; any thread may read it.
        self.load = EngineLoad()

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and output of one sequence at most."""
        return self._scheduler.max_sequence_tokens

    def record(self, timeline: Timeline) -> None:
        """Note the phases of steps in *timeline*, which is written at its end or the loop's.

        Call it before `start`.
        """
        self._timeline = timeline

    def start(self) -> None:
        """Start the loop."""
        self._awake.start()
        self._thread.start()

    def stop(self) -> None:
        """End the loop after the step under way, and wait for it. What runs is dropped."""
        self._commands.put(None)
        # A frozen device must not keep the process; the thread does not either. In short waits, so
        # that the time does not run out while the whole process is suspended.
        for _ in range(round(_JOIN_TIMEOUT_S / _JOIN_TRY_S)):
            self._thread.join(timeout=_JOIN_TRY_S)
            if not self._thread.is_alive():
                break
        self._awake.stop()

    def submit(self, request: Request) -> None:
        """Hand a request over. Any thread; every answer, a refusal too, comes through the sink."""
        if not self._is_busy():
            self._progress_s = self._awake.now_s()
        self._commands.put(request)

    def abort(self, key: int) -> None:
        """End a request before the next step. Any thread; nothing happens if it is unknown."""
        self._commands.put(key)

    def between_steps(self, work: _Work) -> None:
        """Run *work* on the engine's thread before its next step. Any thread; it must be short."""
        self._commands.put(work)

    def stalled_s(self) -> float:
        """Return for how long work is pending without a completed step. Any thread.

        Time in which the whole process was suspended does not count. Infinity if the loop is gone.
        """
        if self._thread.ident is not None and not self._thread.is_alive():
            return 0.0 if self._is_stopping else math.inf
        return self._awake.now_s() - self._progress_s if self._is_busy() else 0.0

    def _is_busy(self) -> bool:
        return bool(self._live) or not self._commands.empty()

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                self._turn()
            except Exception:  # noqa: BLE001 - supervised loop: a mistake of ours must not end it
                _log.exception("the engine's own books are wrong; dropping all requests")
                self._start_afresh()
            self._progress_s = self._awake.now_s()
        self._timeline.write()

    def _turn(self) -> None:
        self._take_commands()
        if not self._scheduler.has_work:
            self._hand_out()
            return
        with self._timeline.step():
            self._step()
            if self._limits.checks_books:
                live = [it.request for it in self._live.values()]
                check_books(self._scheduler, self._cache, self._limits, live)
            with self._timeline.phase("hand out"):
                self._hand_out()

    def _take_commands(self) -> None:
        """Apply all commands that wait; if there is nothing else to do, wait for one."""
        may_wait = not self._scheduler.has_work and not self._outputs
        while may_wait or not self._commands.empty():
            command = self._commands.get()
            may_wait = False
            if command is None:
                self._is_stopping = True
                return
            if isinstance(command, int):
                self._abort(command)
            elif callable(command):
                command(self._cache)
            else:
                self._add(command)

    def _add(self, request: Request) -> None:
        live = self._live[request.key] = _Live(request)
        try:
            live.choices = self._choices(request)
            for choice in live.choices:
                self._replay(choice)
            if request.is_finished:
                self._output(live)
            else:
                self._scheduler.add(request)
                self._query_tokens += len(request.prompt_token_ids)
        except Exception as error:  # noqa: BLE001 - edge: no request may end the loop
            self._fail(live, _told(request, error))

    def _choices(self, request: Request) -> list[Choice]:
        counts = Counter(request.prompt_token_ids) if request.sampling.uses_counts else Counter()
        return [
            Choice(seq, self._table, counts, self.max_sequence_tokens) for seq in request.sequences
        ]

    def _replay(self, choice: Choice) -> None:
        finish = choice.replay()
        if finish is not None:
            seq = choice.seq
            seq.state, seq.finish = SequenceState.FINISHED, finish
            output = self._output(self._live[seq.request.key])
            output.choices.append(choice.ended_elsewhere(finish))

    def _abort(self, key: int) -> None:
        live = self._live.get(key)
        if live is not None:
            self._scheduler.abort(live.request)
            self._output(live)

    def _step(self) -> None:
        started_s = self._clock.now_s()
        plan = StepPlan([], [], [])
        failed = False
        try:
            with self._timeline.phase("schedule"):
                plan = self._scheduler.plan(started_s)
            self._note_sizes(plan)
            self._note_started(plan)
            self._compute([chunk for chunk in plan.chunks if chunk.seq.request.pooling is None])
            self._pool([chunk for chunk in plan.chunks if chunk.seq.request.pooling is not None])
        except Exception:  # noqa: BLE001 - edge: a step's failure fails its requests, not the engine
            _log.exception("a step failed")
            failed = True
            self._fail_step(plan)
        self._observe(plan, self._clock.now_s() - started_s, failed=failed)

    def _compute(self, chunks: list[Chunk]) -> None:
        if not chunks:
            return
        rows = [_row(chunk) for chunk in chunks]
        with self._timeline.phase("model"):
            logits = self._runner.forward(rows)
        draws: list[tuple[Choice, int]] = []
        end = 0
        for chunk, row in zip(chunks, rows, strict=True):
            start, end = end, end + row.num_logits
            self._scheduler.computed(chunk)
            self._note_prompt_logprobs(chunk, logits[start:end])
            if chunk.gives_token:
                draws.extend((choice, end - 1) for choice in self._drawing(chunk.seq))
        specs = self._specs(draws)
        if not specs:
            return
        places = [idx for _, idx, _ in specs]
        rows_to_draw = logits if places == list(range(end)) else logits[places]
        with self._timeline.phase("sample"):
            drawn = self._runner.sample(rows_to_draw, [spec for _, _, spec in specs])
        with self._timeline.phase("detokenise"):
            for (choice, _, _), sampled in zip(specs, drawn, strict=True):
                self._accept(choice, sampled)

    def _note_sizes(self, plan: StepPlan) -> None:
        self._timeline.note_sizes(
            sequences=len(plan.chunks),
            decode_tokens=sum(chunk.is_decode for chunk in plan.chunks),
            tokens=sum(chunk.num_tokens for chunk in plan.chunks),
            admitted=len(plan.admitted),
            preempted=len(plan.preempted),
        )

    def _specs(self, draws: list[tuple[Choice, int]]) -> list[tuple[Choice, int, SampleSpec]]:
        """Say how each choice draws; a request whose constraint cannot say so fails alone."""
        specs = []
        for choice, place in draws:
            request = choice.seq.request
            try:
                specs.append((choice, place, choice.spec()))
            except Exception as error:  # noqa: BLE001 - edge: a constraint's mistake is its own
                self._fail(self._live[request.key], _told(request, error))
        return [it for it in specs if it[0].seq.finish is None]

    def _pool(self, chunks: list[Chunk]) -> None:
        """Compute chunks of texts of which embeddings are wanted."""
        if not chunks:
            return
        rows = [_row(chunk) for chunk in chunks]
        with self._timeline.phase("model"):
            hidden = self._runner.hidden(rows)
        for chunk, states in zip(
            chunks, hidden.split([row.num_logits for row in rows]), strict=True
        ):
            self._scheduler.computed(chunk)
            live = self._live[chunk.seq.request.key]
            live.pooler.add(states, is_first=chunk.start == 0)
            if chunk.gives_token:
                self._output(live).embedding = live.pooler.vector()
                self._scheduler.finish(chunk.seq, Finish.STOP)

    def _drawing(self, seq: Sequence) -> list[Choice]:
        """Return the choices that draw from *seq*'s logits: its own, and those forked from it."""
        choices = self._live[seq.request.key].choices
        drawing = [choices[seq.choice_idx]]
        for fork in self._scheduler.fork(seq):
            if fork.copy is not None:
                self._runner.copy_block(*fork.copy)
            drawing.append(choices[fork.seq.choice_idx])
        return drawing

    def _accept(self, choice: Choice, sampled: Any) -> None:  # Any: Sampled
        seq, now_s = choice.seq, self._clock.now_s()
        request = seq.request
        if seq.finish is not None:
            # Another choice has failed the request in this very step.
            return
        if request.first_token_s is None:
            request.first_token_s = now_s
        request.last_token_s = now_s
        live = self._live[request.key]
        try:
            part = choice.accept(sampled)
        except Exception as error:  # noqa: BLE001 - edge: a constraint's mistake is its own
            self._fail(live, _told(request, error))
            return
        if part.finish is not None:
            self._scheduler.finish(seq, part.finish)
        output = self._output(live)
        output.choices.append(part)
        output.prompt_logprobs += live.prompt_logprobs
        live.prompt_logprobs = []

    def _note_started(self, plan: StepPlan) -> None:
        for seq in plan.admitted:
            live = self._live[seq.request.key]
            if not live.said_started:
                live.said_started = True
                request = live.request
                self._hit_tokens += request.cached_tokens
                self._output(live).queue_s = (request.scheduled_s or 0.0) - request.accepted_s

    def _note_prompt_logprobs(self, chunk: Chunk, logits: Any) -> None:  # Any: (num_logits, V)
        request = chunk.seq.request
        if not request.wants_prompt_logprobs or chunk.start >= chunk.seq.num_prompt - 1:
            return
        live = self._live[request.key]
        first = live.num_prompt_scored
        last = min(chunk.start + chunk.num_tokens, chunk.seq.num_prompt - 1)
        # A prompt that was preempted is computed again, cut in other places.
        if chunk.seq.choice_idx == 0 and chunk.start <= first < last:
            ids = request.prompt_token_ids[first + 1 : last + 1]
            rows = logits[first - chunk.start : last - chunk.start]
            num_top = request.num_prompt_top_logprobs
            live.prompt_logprobs.extend(token_logprobs(rows, ids, num_top))
            live.num_prompt_scored = last

    def _output(self, live: _Live) -> RequestOutput:
        """Return the request's output of this step, to be filled."""
        return self._outputs.setdefault(
            live.request.key, RequestOutput(live.request.key, usage=None)
        )

    def _fail(self, live: _Live, error: HeadraceError) -> None:
        self._scheduler.abort(live.request)
        self._output(live).error = error

    def _fail_step(self, plan: StepPlan) -> None:
        """Fail the requests of a step; all of them, if not even a plan could be made."""
        keys = {chunk.seq.request.key for chunk in plan.chunks} or set(self._live)
        for live in [self._live[key] for key in keys if key in self._live]:
            self._fail(live, Internal())

    def _start_afresh(self) -> None:
        self._events.cleared()
        self._cache = PrefixCache(self._num_blocks, self._events)
        self._scheduler = Scheduler(self._limits, self._cache, self._pace)
        for live in self._live.values():
            self._output(live).error = Internal()

    def _hand_out(self) -> None:
        """Complete the step's outputs and pass them on, all in one call."""
        self._events.flush()
        self._publish_load()
        if not self._outputs:
            return
        outputs, self._outputs = list(self._outputs.values()), {}
        for output in outputs:
            request = self._live[output.key].request
            output.usage = _usage(request)
            output.is_last = output.error is not None or request.is_finished
            if output.is_last:
                output.times = _times(request)
                del self._live[output.key]
        self._sink(outputs)

    def _observe(self, plan: StepPlan, duration_s: float, *, failed: bool) -> None:
        decode_tokens = sum(chunk.is_decode for chunk in plan.chunks)
        prefill_tokens = sum(chunk.num_tokens for chunk in plan.chunks) - decode_tokens
        goes_on = any(not chunk.gives_token for chunk in plan.chunks)
        self._rates.add(prefill_tokens, decode_tokens, duration_s, goes_on=goes_on)
        if plan.chunks and not failed:
            self._pace.note(prefill_tokens, decode_tokens, duration_s)
        self._num_preempted += len(plan.preempted)
        self._on_step(
            StepFacts(duration_s, prefill_tokens, decode_tokens, len(plan.preempted), failed)
        )

    def _publish_load(self) -> None:
        running = self._scheduler.running
        waiting = self._scheduler.waiting
        running_keys = {seq.request.key for seq in running}
        self.load = EngineLoad(
            num_waiting=len({seq.request.key for seq in waiting} - running_keys),
            num_running=len(running_keys),
            queued_prefill_tokens=sum(_left(seq) for seq in (*running, *waiting)),
            running_tokens=sum(seq.num_computed for seq in running),
            kv_used_tokens=self._cache.pool.num_used * self._limits.block_size,
            prefill_tokens_per_s=self._rates.prefill_tokens_per_s,
            decode_tokens_per_s=self._rates.decode_tokens_per_s,
            decode_step_s=self._rates.decode_step_s,
            decode_step_streams=self._rates.decode_step_streams,
            prefix_hit_tokens_total=self._hit_tokens,
            prefix_query_tokens_total=self._query_tokens,
            num_preemptions_total=self._num_preempted,
        )


def _row(chunk: Chunk) -> Row:
    seq, end = chunk.seq, chunk.start + chunk.num_tokens
    num_logits = int(chunk.gives_token)
    if seq.request.pooling is not None:
        wanted = seq.request.pooling.num_wanted(chunk.num_tokens, is_last_chunk=chunk.gives_token)
        return Row(seq.token_ids[chunk.start : end], chunk.start, seq.block_table, wanted)
    if seq.request.wants_prompt_logprobs and chunk.start < seq.num_prompt - 1:
        num_logits = chunk.num_tokens
    return Row(seq.token_ids[chunk.start : end], chunk.start, seq.block_table, num_logits)


def _left(seq: Sequence) -> int:
    """Prompt tokens still to be computed; of a sequence that decodes: none."""
    return seq.num_uncomputed if seq.num_uncomputed > 1 else 0


def _told(request: Request, error: Exception) -> HeadraceError:
    """Return what is told of a failure; what lies inside is for the log."""
    if isinstance(error, HeadraceError):
        return error
    _log.error("request %s failed", request.request_id, exc_info=error)
    return Internal()


def _usage(request: Request) -> Usage:
    return Usage(len(request.prompt_token_ids), request.cached_tokens, request.output_tokens)


def _times(request: Request) -> Times | None:
    if request.scheduled_s is None:
        return None
    first_s = request.scheduled_s if request.first_token_s is None else request.first_token_s
    last_s = first_s if request.last_token_s is None else request.last_token_s
    return Times(
        queue_s=request.scheduled_s - request.accepted_s,
        prefill_s=first_s - request.scheduled_s,
        decode_s=last_s - first_s,
        num_preemptions=request.num_preemptions,
    )
