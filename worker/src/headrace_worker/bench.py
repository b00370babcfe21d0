"""`headrace worker bench`: how fast the whole engine is on this machine.

Everything that serving has besides the network is in the path: scheduling, paging, sampling and
detokenising. Each figure is the best of a few runs, since other programs may disturb some.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psutil

from headrace_common.blocks import chain_key
from headrace_common.errors import HeadraceError
from headrace_worker.engine.direct import DirectEngine, limits_for
from headrace_worker.engine.output import RequestOutput
from headrace_worker.engine.profile import MAX_STEPS, Timeline
from headrace_worker.engine.request import Request, SamplingParams, StopParams
from headrace_worker.kernels.rounding import Rounding
from headrace_worker.model_host import ModelHost, ReadyModel
from headrace_worker.settings import default_cache_dir

_RUNS = 3
# Prompts are not held back for streams that run: the first would end before the last begin.
_NO_PACE = 1e9


@dataclass(frozen=True)
class Sizes:
    """What is measured: tokens of prompts, of the context before a decode, and of the output."""

    prompt_tokens: int = 512
    context_tokens: int = 128
    output_tokens: int = 32
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)


class Bench:
    """An engine and how long it takes for something.

    Args:
        model: what runs.
        token_budget: most tokens in one step, as in the worker's settings.
        timeline: where the first steps are noted; None = nowhere.
    """

    def __init__(
        self, model: ReadyModel, token_budget: int, timeline: Timeline | None = None
    ) -> None:
        self._keys, self._token_budget = count(1), token_budget
        self._vocab_size = model.info.vocab_size
        self._engine = DirectEngine(model, limits_for(model, token_budget, slowdown_ratio=_NO_PACE))
        if timeline is not None:
            self._engine.engine.record(timeline)

    def __enter__(self) -> Bench:
        self._engine.__enter__()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._engine.__exit__()

    def prefill_tokens_per_s(self, num_tokens: int) -> float:
        """Rate of reading one prompt of which nothing is cached."""
        return max(num_tokens / self._first_token_s(num_tokens) for _ in range(_RUNS))

    def cached_speedup(self, num_tokens: int) -> float:
        """How much sooner the first token of a prompt comes once its prefix is cached."""
        fresh = min(self._first_token_s(num_tokens) for _ in range(_RUNS))
        self._first_token_s(num_tokens, seed=1)
        return fresh / min(self._first_token_s(num_tokens, seed=1) for _ in range(_RUNS))

    def decode_tokens_per_s(self, batch_size: int, context_tokens: int, num_tokens: int) -> float:
        """Rate of *batch_size* streams together, while all of them run.

        Args:
            batch_size: streams.
            context_tokens: prompt of each.
            num_tokens: that all make together with one another; each makes some more.
        """
        # The first stream is ahead by the steps that the other prompts take.
        ahead = -(-batch_size * context_tokens // self._token_budget) + batch_size
        return max(
            self._decode_once(batch_size, context_tokens, num_tokens + ahead) for _ in range(_RUNS)
        )

    def _decode_once(self, batch_size: int, context_tokens: int, num_tokens: int) -> float:
        keys = [self._submit(context_tokens, num_tokens, seed=None) for _ in range(batch_size)]
        times: dict[int, list[float]] = {key: [] for key in keys}
        open_keys = set(keys)
        while open_keys:
            at, output = self._next()
            times[output.key] += [at for choice in output.choices for _ in choice.tokens]
            if output.is_last:
                open_keys.discard(output.key)
        begin, end = max(it[0] for it in times.values()), min(it[-1] for it in times.values())
        made = sum(begin < at <= end for each in times.values() for at in each)
        return made / max(1e-9, end - begin)

    def _first_token_s(self, num_tokens: int, seed: int | None = None) -> float:
        begin = time.perf_counter()
        self._submit(num_tokens, 1, seed)
        while True:
            at, output = self._next()
            if output.is_last:
                return at - begin

    def _submit(self, prompt_tokens: int, output_tokens: int, seed: int | None) -> int:
        """Hand a prompt over; one of the same seed shares its tokens, None shares with nobody."""
        key = next(self._keys)
        start = 7 * key + 1000 if seed is None else seed
        ids = [(start + 13 * idx * idx) % self._vocab_size for idx in range(prompt_tokens)]
        request = Request(
            key=key,
            request_id=f"bench-{key}",
            prompt_token_ids=ids,
            sampling=SamplingParams(temperature=0.8, top_p=0.95),
            stopping=StopParams(max_tokens=output_tokens),
            seed=key,
            chain_key=chain_key("bench"),
            skip_prefix_cache=seed is None,
        )
        self._engine.submit(request)
        return key

    def _next(self) -> tuple[float, RequestOutput]:
        return self._engine.next()


def measure(
    model: ReadyModel, sizes: Sizes, token_budget: int = 256, profile: Path | None = None
) -> dict[str, object]:
    """Return all figures, ready for JSON; *profile* = where to write a timeline of the steps."""
    timeline = None if profile is None else Timeline(profile, MAX_STEPS)
    with Bench(model, token_budget, timeline) as bench:
        decode = {
            str(size): bench.decode_tokens_per_s(size, sizes.context_tokens, sizes.output_tokens)
            for size in sizes.batch_sizes
        }
        return {
            "prefill_tokens_per_s": bench.prefill_tokens_per_s(sizes.prompt_tokens),
            "cached_prefix_speedup_ratio": bench.cached_speedup(sizes.prompt_tokens),
            "decode_tokens_per_s": decode,
            "memory_bytes": psutil.Process().memory_info().rss,
            "prompt_tokens": sizes.prompt_tokens,
            "context_tokens": sizes.context_tokens,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 = measured, 1 = the model cannot be had, said on stderr."""
    parser = argparse.ArgumentParser(prog="headrace worker bench", description=__doc__)
    home = default_cache_dir().parent / "models"
    parser.add_argument(
        "model", type=Path, nargs="?", default=home / "SmolLM2-135M-Instruct.Q4_1.gguf",
        help="GGUF file or model folder",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=1, help="compute threads")
    parser.add_argument(
        "--activations", choices=[each.name.lower() for each in Rounding], default="int16",
        help="what activations are rounded to",
    )  # fmt: skip
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="what computes")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="write a timeline for ui.perfetto.dev"
    )
    parser.add_argument("--json", action="store_true", help="for scripts")
    args = parser.parse_args(arguments)
    started = time.perf_counter()
    try:
        rounding = Rounding[args.activations.upper()]
        host = ModelHost(
            args.model, default_cache_dir(), 16_384, args.threads, rounding, args.device
        )
        model = host.load()
    except HeadraceError as error:
        sys.stderr.write(f"{error.public_message}\n")
        return 1
    figures = {
        "load_s": time.perf_counter() - started,
        **measure(model, Sizes(), profile=args.profile),
    }
    sys.stdout.write(json.dumps(figures, indent=1) + "\n" if args.json else _text(figures))
    return 0


def _text(figures: dict[str, object]) -> str:
    lines = [f"{name:32}{_figure(value)}" for name, value in figures.items()]
    return "\n".join(lines) + "\n"


def _figure(value: object) -> str:
    if isinstance(value, dict):
        return "  ".join(f"batch {size}: {rate:.1f}" for size, rate in value.items())
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
