"""Random traffic on one engine with the real model, all books checked after every step.

``python bench/soak_engine.py [--minutes 20] [--seed 0] [--threads 2]`` keeps requests of all kinds
on an engine with a small pool, so that blocks run out and sequences are preempted: prompts from one
token to hundreds, many with shared beginnings, several choices, seeds and greedy, penalties, a JSON
schema, all classes and service levels, resumed ones, embeddings, and one in eight is aborted.
Printed every 30 s: requests ended, steps, preemptions, memory. It fails if a request ends with an
error that is not a refusal, if a constrained text is not what was asked for, if a request gets no
end, if blocks are held once all have ended, or if memory still grows in the second half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import random
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from headrace_common.blocks import chain_key
from headrace_common.clock import SystemClock
from headrace_common.errors import QueueFull
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_worker.constraints.compiler import ConstraintCompiler
from headrace_worker.constraints.matcher import tokenizer_of
from headrace_worker.engine.constraint import Constraint
from headrace_worker.engine.direct import DirectEngine, limits_for
from headrace_worker.engine.load import StepFacts
from headrace_worker.engine.output import RequestOutput
from headrace_worker.engine.pooling import Pooling
from headrace_worker.engine.request import Finish, Priority, Request, SamplingParams, StopParams
from headrace_worker.model_host import ModelHost, ReadyModel
from headrace_worker.settings import default_cache_dir

_NUM_BLOCKS = 96
_AT_ONCE = 24
_MAX_WAITING = 20
_REPORT_S = 30.0
# In short waits: a process that was suspended meanwhile would take it for a request without an end.
_LONGEST_WAIT_S, _SHORT_WAIT_S = 60.0, 0.5
# What the second half may use more than the first one's end.
_MAX_GROWTH_RATIO, _MAX_GROWTH_BYTES = 1.02, 24 << 20
_SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}


@dataclass
class Totals:
    """What happened."""

    outcomes: Counter[str] = field(default_factory=Counter)
    num_steps: int = 0
    tokens: int = 0
    rss_bytes: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def note_step(self, facts: StepFacts) -> None:
        """Count a step; on the engine's thread."""
        self.num_steps += 1
        self.tokens += facts.prefill_tokens + facts.decode_tokens
        if facts.failed:
            self.problems.append("a step failed")


class Quiet:
    """A compiler's counters that nobody reads."""

    def observe_compile(self, outcome: str, duration_s: float) -> None:
        """Forget it."""


class Traffic:
    """Makes requests, follows them to their end."""

    def __init__(self, model: ReadyModel, schema: Constraint, seed: int, totals: Totals) -> None:
        self._rng = random.Random(seed)
        self._vocab, self._table, self._schema = model.info.vocab_size, model.table, schema
        self._end_ids = frozenset(model.info.eos_token_ids)
        self._prefixes = [self._ids(self._rng.randrange(16, 160)) for _ in range(6)]
        self._totals, self._key = totals, 0
        self.open: dict[int, tuple[Request, bytearray]] = {}

    def next(self) -> Request:
        """Make a request of a random kind."""
        rng, self._key = self._rng, self._key + 1
        prompt = self._ids(rng.choice([1, 3, 17, 40, 120, 300]))
        if rng.random() < 0.5:
            prompt = [*rng.choice(self._prefixes), *prompt]
        kind = rng.choices(["plain", "schema", "embedding"], [8, 1, 1])[0]
        choices = rng.choice([1, 1, 1, 2, 3]) if kind == "plain" else 1
        output = rng.choice([1, 4, 16, 64])
        resume = {0: self._ids(rng.randrange(1, 8))} if kind == "plain" and output > 8 else {}
        request = Request(
            key=self._key,
            request_id=f"soak-{self._key}",
            prompt_token_ids=prompt,
            sampling=self._sampling(),
            stopping=StopParams(
                max_tokens=64 if kind == "schema" else output, end_token_ids=self._end_ids
            ),
            seed=rng.getrandbits(63),
            chain_key=chain_key("soak", "", rng.choice([b"", b"one", b"two"])),
            num_choices=choices,
            resume=resume if rng.random() < 0.2 else {},
            priority=rng.choice(list(Priority)),
            num_top_logprobs=rng.choice([None, None, 3]) if kind == "plain" else None,
            wants_prompt_logprobs=kind == "plain" and rng.random() < 0.05,
            skip_prefix_cache=rng.random() < 0.1,
            pooling=rng.choice(list(Pooling)) if kind == "embedding" else None,
            ttft_slo_s=rng.choice([None, 0.5, 30.0]),
            tpot_slo_s=rng.choice([None, 0.02, 1.0]),
            accepted_s=time.monotonic(),
            constraint=self._schema if kind == "schema" else None,
        )
        self.open[request.key] = request, bytearray()
        return request

    def victim(self) -> int | None:
        """Return the key of a request to be aborted; None = none this time."""
        return self._rng.choice(list(self.open)) if self._rng.random() < 0.125 else None

    def take(self, output: RequestOutput) -> None:
        """Note an output; check a request that ended."""
        request, text = self.open[output.key]
        for part in output.choices:
            text.extend(part.text.encode())
        if not output.is_last:
            return
        del self.open[output.key]
        ends = {seq.finish for seq in request.sequences}
        if output.error is not None:
            self._totals.outcomes[
                "refused" if isinstance(output.error, QueueFull) else "error"
            ] += 1
            if not isinstance(output.error, QueueFull):
                self._totals.problems.append(f"{request.request_id}: {output.error!r}")
        elif Finish.ABORT in ends:
            self._totals.outcomes["aborted"] += 1
        else:
            self._totals.outcomes["done"] += 1
            self._check(request, bytes(text), output, ends)

    def _check(
        self, request: Request, text: bytes, output: RequestOutput, ends: set[Finish | None]
    ) -> None:
        if request.pooling is not None and output.embedding is None:
            self._totals.problems.append(f"{request.request_id}: no embedding")
        if request.constraint is not None and Finish.STOP in ends:
            try:
                answer = json.loads(text)
                sound = set(answer) == {"ok", "n"} and isinstance(answer["ok"], bool)
            except ValueError:
                sound = False
            if not sound:
                self._totals.problems.append(f"{request.request_id}: not by the schema: {text!r}")

    def _sampling(self) -> SamplingParams:
        rng = self._rng
        return SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.3]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 40]),
            min_p=rng.choice([0.0, 0.05]),
            frequency_penalty=rng.choice([0.0, 0.5]),
            repetition_penalty=rng.choice([1.0, 1.1]),
            logit_bias=rng.choice([{}, {5: 3.0}]),
        )

    def _ids(self, number: int) -> list[int]:
        return [self._rng.randrange(100, self._vocab) for _ in range(number)]


def main() -> int:
    """Run; 0 = nothing was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    home = default_cache_dir().parent / "models"
    parser.add_argument(
        "model", type=Path, nargs="?", default=home / "SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    model = ModelHost(args.model, default_cache_dir(), _NUM_BLOCKS * 16, args.threads).load()
    schema = asyncio.run(_schema(model))
    totals = Totals()
    limits = limits_for(model, max_running=12, max_waiting=_MAX_WAITING, checks_books=True)
    with DirectEngine(model, limits, _NUM_BLOCKS, totals.note_step) as engine:
        _run(engine, Traffic(model, schema, args.seed, totals), totals, 60 * args.minutes)
        load = engine.engine.load
        if load.kv_used_tokens or load.num_running or load.num_waiting:
            totals.problems.append(f"something is left: {load}")
        totals.outcomes["preemptions"] = load.num_preemptions_total
        totals.outcomes["cached tokens"] = load.prefix_hit_tokens_total
    _check_memory(totals)
    for problem in totals.problems[:20]:
        _say(f"WRONG: {problem}")
    _say(f"{totals.num_steps} steps, all books checked; {dict(totals.outcomes)}")
    return int(bool(totals.problems))


def _run(engine: DirectEngine, traffic: Traffic, totals: Totals, seconds: float) -> None:
    started_s = reported_s = time.monotonic()
    while (now_s := time.monotonic()) < started_s + seconds or traffic.open:
        if now_s < started_s + seconds and len(traffic.open) < _AT_ONCE:
            engine.submit(traffic.next())
            if (victim := traffic.victim()) is not None:
                engine.engine.abort(victim)
        else:
            if (output := _next(engine)) is None:
                totals.problems.append(f"{len(traffic.open)} requests got no end")
                return
            traffic.take(output)
        if now_s - reported_s >= _REPORT_S:
            reported_s = now_s
            totals.rss_bytes.append(psutil.Process().memory_info().rss)
            _say(
                f"{now_s - started_s:5.0f} s  {totals.num_steps:7} steps  {totals.tokens:8} tokens"
                f"  {totals.rss_bytes[-1] / 2**20:7.1f} MiB  {dict(totals.outcomes)}"
            )


def _next(engine: DirectEngine) -> RequestOutput | None:
    """Return the next output; None if there is none for a minute in which this process ran."""
    for _ in range(round(_LONGEST_WAIT_S / _SHORT_WAIT_S)):
        with suppress(queue.Empty):
            return engine.next_or_error(_SHORT_WAIT_S)[1]
    return None


def _check_memory(totals: Totals) -> None:
    """Compare the end of the first half with the end of the second."""
    rss = totals.rss_bytes
    if len(rss) < 8:
        _say("too short to say anything of memory: at least 8 reports are needed")
        return
    quarter = len(rss) // 4
    middle, end = median(rss[quarter : 2 * quarter]), median(rss[-quarter:])
    _say(f"memory: {middle / 2**20:.1f} MiB before the middle, {end / 2**20:.1f} MiB at the end")
    if end > _MAX_GROWTH_RATIO * middle + _MAX_GROWTH_BYTES:
        totals.problems.append("memory grows")


async def _schema(model: ReadyModel) -> Constraint:
    compiler = ConstraintCompiler(
        lambda: tokenizer_of(model.info, model.table), SystemClock(), Quiet()
    )
    try:
        return await compiler.compile(b"", pb.OutputConstraint(json_schema=json.dumps(_SCHEMA)))
    finally:
        compiler.close()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
