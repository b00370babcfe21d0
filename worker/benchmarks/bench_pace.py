"""Do running streams keep their pace while a long prompt is read?

``python worker/benchmarks/bench_pace.py [MODEL.gguf] [--threads 2] [--streams 1 4 8]`` lets streams
run and hands over prompts of 1,500 tokens (nothing of them cached), one in each round. Between them
as many steps without a prompt are watched as the prompt took, so that a pause of the machine can be
told from one of ours. For each number of streams: the usual gap between a stream's tokens (the
median without a prompt); as multiples of it the median and the worst gap beside a prompt and the
worst without; how many gaps of each were above 3; the longest time that a loop that only looks at
the clock lost at once; and the prompt's time to first token beside the streams and alone. Once with
the worker's rule for the chunks' size and once without, then every chunk takes the whole budget;
`--rule yes` leaves the second out. Each line comes as soon as it is known: on a slow machine a
prompt beside streams takes minutes. Exit code 1 = with the rule a gap is above 3 times the usual
one even without what the machine was seen to lose at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count, pairwise
from pathlib import Path
from statistics import median

from headrace_common.blocks import chain_key
from headrace_worker.engine.direct import DirectEngine, limits_for
from headrace_worker.engine.request import Request, SamplingParams, StopParams
from headrace_worker.engine.scheduler import SchedulerLimits
from headrace_worker.kernels.rounding import Rounding
from headrace_worker.model_host import ModelHost, ReadyModel
from headrace_worker.settings import default_cache_dir

_PROMPT_TOKENS = 1500
_CONTEXT_TOKENS = 64
_QUIET_TOKENS = 40
_STREAM_TOKENS = 3500
_SPIN_S = 1.0
_GOAL = 3.0
_WITHOUT_RULE = 1e9
_HEAD = (
    f"goal: worst gap <= {_GOAL:g} x the usual one, while {_PROMPT_TOKENS} tokens are read\n"
    "                          beside a prompt             without          machine\n"
    "streams  rule  usual gap  median  worst  above goal   worst  above goal  lost"
    "  TTFT beside   alone"
)
_keys = count(1)


@dataclass(frozen=True)
class Figures:
    """One run. Durations in milliseconds, gaps in usual ones."""

    num_streams: int
    has_rule: bool
    usual_gap_ms: float
    median_gap_ratio: float
    worst_gap_ratio: float
    worst_without_ratio: float
    num_gaps: int
    num_above: int
    num_above_without: int
    machine_lost_ms: float
    ttft_beside_ms: float
    ttft_alone_ms: float

    @property
    def is_ours(self) -> bool:
        """Whether the worst gap misses the goal by more than the machine was seen to lose."""
        lost = max(self.worst_without_ratio - 1, self.machine_lost_ms / self.usual_gap_ms)
        return self.worst_gap_ratio - lost > _GOAL


class Run:
    """Streams on one engine, then long prompts beside them."""

    def __init__(self, engine: DirectEngine, vocab_size: int) -> None:
        self._engine, self._vocab_size = engine, vocab_size
        self._times: dict[int, list[float]] = {}
        self._sent_s: dict[int, float] = {}

    def figures(self, num_streams: int, rounds: int, *, has_rule: bool) -> Figures:
        """Measure: first the prompt alone, twice, as the first time teaches and touches memory."""
        alone_s = min(self._first_token_s(self._submit(_PROMPT_TOKENS, 1)) for _ in range(2))
        lost_s = longest_pause_s()
        streams = [self._submit(_CONTEXT_TOKENS, _STREAM_TOKENS) for _ in range(num_streams)]
        self._watch(streams, _QUIET_TOKENS)
        # Once unmeasured, for the rule to learn from, as in a worker that has served anything.
        self._first_token_s(self._submit(_PROMPT_TOKENS, 1))
        beside: list[float] = []
        without: list[float] = []
        waits_s = []
        for _ in range(rounds):
            sent = self._submit(_PROMPT_TOKENS, 1)
            waits_s.append(self._first_token_s(sent))
            at_s = self._times[sent][0]
            gaps = list(self._gaps(streams, at_s - waits_s[-1], at_s))
            beside += gaps
            # The step that ended the prompt may be a token of some streams already.
            begin_s = self._watch(streams, 2)
            end_s = self._watch(streams, max(_QUIET_TOKENS, len(gaps) // num_streams))
            without += self._gaps(streams, begin_s, end_s)
        for key in streams:
            self._engine.engine.abort(key)
        usual_s = median(without)
        return Figures(
            num_streams, has_rule, 1000 * usual_s,
            median_gap_ratio=median(beside) / usual_s,
            worst_gap_ratio=max(beside) / usual_s,
            worst_without_ratio=max(without) / usual_s,
            num_gaps=len(beside),
            num_above=sum(gap > _GOAL * usual_s for gap in beside),
            num_above_without=sum(gap > _GOAL * usual_s for gap in without),
            machine_lost_ms=1000 * max(lost_s, longest_pause_s()),
            ttft_beside_ms=1000 * median(waits_s),
            ttft_alone_ms=1000 * alone_s,
        )  # fmt: skip

    def _watch(self, streams: list[int], num_tokens: int) -> float:
        """Let each stream make so many more tokens; return when the last of them had."""
        wanted = {key: len(self._times[key]) + num_tokens for key in streams}
        while any(len(self._times[key]) < number for key, number in wanted.items()):
            self._take()
        return max(self._times[key][-1] for key in streams)

    def _gaps(self, keys: list[int], begin_s: float, end_s: float) -> Iterator[float]:
        for key in keys:
            for earlier, later in pairwise(self._times[key]):
                if later > begin_s and earlier < end_s:
                    yield later - earlier

    def _first_token_s(self, key: int) -> float:
        while not self._times[key]:
            self._take()
        return self._times[key][0] - self._sent_s[key]

    def _submit(self, prompt_tokens: int, output_tokens: int) -> int:
        key = next(_keys)
        ids = [(7919 * key + 13 * idx * idx) % self._vocab_size for idx in range(prompt_tokens)]
        self._times[key] = []
        self._sent_s[key] = self._engine.submit(
            Request(
                key=key,
                request_id=f"pace-{key}",
                prompt_token_ids=ids,
                sampling=SamplingParams(temperature=0.8, top_p=0.95),
                stopping=StopParams(max_tokens=output_tokens),
                seed=key,
                chain_key=chain_key("pace"),
                skip_prefix_cache=True,
            )
        )
        return key

    def _take(self) -> None:
        at_s, output = self._engine.next()
        self._times[output.key].extend(at_s for part in output.choices for _ in part.tokens)


def longest_pause_s() -> float:
    """Look at the clock all the time for a while; return the longest time between two looks."""
    longest_s, before_s = 0.0, time.perf_counter()
    end_s = before_s + _SPIN_S
    while before_s < end_s:
        now_s = time.perf_counter()
        longest_s, before_s = max(longest_s, now_s - before_s), now_s
    return longest_s


def main() -> int:
    """Run all; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    home = default_cache_dir().parent / "models"
    parser.add_argument(
        "model", type=Path, nargs="?", default=home / "SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--activations", choices=("float32", "int16", "int8"), default="int16")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rule", choices=("yes", "no", "both"), default="both")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rounding = Rounding[args.activations.upper()]
    model = ModelHost(args.model, default_cache_dir(), 32_768, args.threads, rounding).load()
    rules = {"yes": (True,), "no": (False,), "both": (True, False)}[args.rule]
    figures = []
    if not args.json:
        _say(_HEAD)
    for num_streams in args.streams:
        for has_rule in rules:
            figures.append(_measure(model, num_streams, args.rounds, has_rule=has_rule))
            if not args.json:
                _say(_line(figures[-1]))
    if args.json:
        _say(json.dumps([asdict(it) for it in figures], indent=1))
    return int(any(it.has_rule and it.is_ours for it in figures))


def _measure(model: ReadyModel, num_streams: int, rounds: int, *, has_rule: bool) -> Figures:
    ratio = SchedulerLimits.slowdown_ratio if has_rule else _WITHOUT_RULE
    with DirectEngine(model, limits_for(model, slowdown_ratio=ratio)) as engine:
        return Run(engine, model.info.vocab_size).figures(num_streams, rounds, has_rule=has_rule)


def _line(it: Figures) -> str:
    return (
        f"{it.num_streams:7}  {'yes' if it.has_rule else 'no':>4}  {it.usual_gap_ms:6.1f} ms"
        f"  {it.median_gap_ratio:6.2f}  {it.worst_gap_ratio:5.2f}"
        f"  {it.num_above:4} of {it.num_gaps:<4}"
        f"  {it.worst_without_ratio:5.2f}  {it.num_above_without:10}  {it.machine_lost_ms:4.1f}"
        f"  {it.ttft_beside_ms:8.0f} ms  {it.ttft_alone_ms:4.0f} ms"
    )


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
