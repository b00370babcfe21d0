"""Decode steps with compiled kernels against plain torch, and prefill, in one run on one thread.

``python worker/benchmarks/bench_decode.py MODEL.gguf [--context 256] [--steps 12]`` prints one line
per batch size: milliseconds of CPU time per step of both (the best of all steps, taken in turns,
as other programs may disturb some) and their ratio; then tokens per second of a 512-token prompt.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from headrace_worker.model.loader import load_model
from headrace_worker.model.runner import ModelRunner, Row
from headrace_worker.prepare import ensure_prepared

_BATCH_SIZES = (1, 4, 8)
_PREFILL_TOKENS = 512
_S = 16


def main() -> int:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--context", type=int, default=256, help="tokens before the decode")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each kind")
    args = parser.parse_args()
    model = load_model(ensure_prepared(args.model, args.model.parents[1] / "prepared"))
    blocks_per_row = args.context // _S + 1
    num_blocks = max(_BATCH_SIZES[-1] * blocks_per_row, _PREFILL_TOKENS // _S)
    runners = {name: ModelRunner(model, num_blocks, backend=name) for name in ("torch", "cpu")}
    for batch_size in _BATCH_SIZES:
        rows = [
            Row([idx + 7], args.context, range(idx * blocks_per_row, (idx + 1) * blocks_per_row), 1)
            for idx in range(batch_size)
        ]
        best = _best_ms(runners, rows, args.steps)
        ratio = best["torch"] / best["cpu"]
        _say(f"B={batch_size}: torch {best['torch']:.1f} ms, kernels {best['cpu']:.1f} ms a step")
        _say(f"     ratio {ratio:.2f}, {1000 * batch_size / best['cpu']:.0f} tokens/s")
    prompt = [
        Row([idx % 1000 for idx in range(_PREFILL_TOKENS)], 0, range(_PREFILL_TOKENS // _S), 1)
    ]
    best = _best_ms({"cpu": runners["cpu"]}, prompt, 3)
    _say(f"prefill of {_PREFILL_TOKENS}: {1000 * _PREFILL_TOKENS / best['cpu']:.0f} tokens/s")
    return 0


def _best_ms(runners: dict[str, ModelRunner], rows: list[Row], steps: int) -> dict[str, float]:
    best = dict.fromkeys(runners, float("inf"))
    for _ in range(steps + 1):
        for name, runner in runners.items():
            start = time.thread_time()
            runner.forward(rows)
            best[name] = min(best[name], 1000 * (time.thread_time() - start))
    return best


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
