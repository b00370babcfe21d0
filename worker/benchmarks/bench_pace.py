"""Do running streams keep their pace while a long prompt is read?

``python worker/benchmarks/bench_pace.py [MODEL.gguf] [--threads 2] [--streams 1 4 8]`` lets streams
run, hands over a prompt of 1,500 tokens (nothing of it cached), and prints for each number of
streams the usual gap between a stream's tokens (the median while nothing else happens), the median
and the worst gap while the prompt is read, both as multiples of the usual one, and the prompt's
time to first token beside the streams and alone. Once with the worker's rule for the chunks'
size and once without, then every chunk takes the whole budget; `--rule yes` leaves the second out.
Each line comes as soon as it is known: on a slow machine a prompt beside streams takes minutes.
Exit code 1 = a worst gap with the rule is above 3 times the usual gap.
"""

from __future__ import annotations

import argparse
import json
import sys
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
_GOAL = 3.0
_WITHOUT_RULE = 1e9
_HEAD = (
    f"goal: worst gap <= {_GOAL:g} x the usual one, while {_PROMPT_TOKENS} tokens are read\n"
    "streams  rule  usual gap  median gap  worst gap  TTFT beside   alone"
)
_keys = count(1)


@dataclass(frozen=True)
class Figures:
    """One run. Durations in milliseconds."""

    num_streams: int
    has_rule: bool
    usual_gap_ms: float
    median_gap_ratio: float
    worst_gap_ratio: float
    ttft_beside_ms: float
    ttft_alone_ms: float


class Run:
    """Streams on one engine, then a long prompt beside them."""

    def __init__(self, engine: DirectEngine, vocab_size: int) -> None:
        self._engine, self._vocab_size = engine, vocab_size
        self._times: dict[int, list[float]] = {}
        self._sent_s: dict[int, float] = {}

    def figures(self, num_streams: int, *, has_rule: bool) -> Figures:
        """Measure: first the prompt alone, twice, as the first time teaches and touches memory."""
        alone_s = min(self._first_token_s(self._submit(_PROMPT_TOKENS, 1)) for _ in range(2))
        streams = [self._submit(_CONTEXT_TOKENS, 2000) for _ in range(num_streams)]
        while any(len(self._times[key]) < _QUIET_TOKENS for key in streams):
            self._take()
        begin_s = max(self._times[key][10] for key in streams)
        usual_s = median(self._gaps(streams, begin_s, float("inf")))
        # Once unmeasured, for the rule to learn from, as in a worker that has served anything.
        self._first_token_s(self._submit(_PROMPT_TOKENS, 1))
        sent = self._submit(_PROMPT_TOKENS, 1)
        beside_s = self._first_token_s(sent)
        at_s = self._times[sent][0]
        gaps = list(self._gaps(streams, at_s - beside_s, at_s))
        for key in streams:
            self._engine.engine.abort(key)
        return Figures(
            num_streams, has_rule, 1000 * usual_s, median(gaps) / usual_s, max(gaps) / usual_s,
            1000 * beside_s, 1000 * alone_s,
        )  # fmt: skip

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
            figures.append(_measure(model, num_streams, has_rule=has_rule))
            if not args.json:
                _say(_line(figures[-1]))
    if args.json:
        _say(json.dumps([asdict(it) for it in figures], indent=1))
    return int(any(it.has_rule and it.worst_gap_ratio > _GOAL for it in figures))


def _measure(model: ReadyModel, num_streams: int, *, has_rule: bool) -> Figures:
    ratio = SchedulerLimits.slowdown_ratio if has_rule else _WITHOUT_RULE
    with DirectEngine(model, limits_for(model, slowdown_ratio=ratio)) as engine:
        return Run(engine, model.info.vocab_size).figures(num_streams, has_rule=has_rule)


def _line(it: Figures) -> str:
    return (
        f"{it.num_streams:7}  {'yes' if it.has_rule else 'no':>4}  {it.usual_gap_ms:6.1f} ms"
        f"  {it.median_gap_ratio:8.2f} x  {it.worst_gap_ratio:7.2f} x"
        f"  {it.ttft_beside_ms:8.0f} ms  {it.ttft_alone_ms:4.0f} ms"
    )


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
