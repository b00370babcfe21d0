"""What every engine is asked, and what is made of the times of its tokens.

Needs nothing but Python: each peer runs it in a virtual environment of its own. An engine is a
function that takes prompts (token ids) and a number of tokens, generates that many for each prompt
with temperature 0.8 and top-p 0.95, never ending early, and returns the clock's reading at each
token, prompt by prompt.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count

BATCH_SIZES = (1, 8, 32)
TEMPERATURE, TOP_P = 0.8, 0.95
VOCAB_SIZE = 49_152
_FEWEST_STEPS = 16
_CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
_clock = time.perf_counter
_keys = count(1)

Times = Sequence[Sequence[float]]
Engine = Callable[[list[list[int]], int], Times]


def arguments() -> argparse.Namespace:
    """Read what every peer's script is called with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="what the peer loads")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=512, help="prompt of the prefill")
    parser.add_argument("--context-tokens", type=int, default=128, help="prompts of the decodes")
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--runs", type=int, default=2, help="the best counts")
    parser.add_argument("--clock", choices=sorted(_CLOCKS), default="wall")
    args = parser.parse_args()
    global _clock  # noqa: PLW0603 - one process measures one engine, by one clock
    _clock = _CLOCKS[args.clock]
    return args


def now() -> float:
    """Read the clock: seconds of the wall, or of the CPU that this process has used."""
    return _clock()


def prompt(num_tokens: int) -> list[int]:
    """Make a prompt that shares no prefix with any other."""
    start = 7 * next(_keys) + 1000
    return [(start + 13 * idx * idx) % VOCAB_SIZE for idx in range(num_tokens)]


def measure(engine: Engine, args: argparse.Namespace, load_s: float) -> None:
    """Write an engine's figures as JSON to stdout."""
    engine([prompt(16)], 2)
    figures = {
        "load_s": load_s,
        "prefill": max(_prefill(engine, args.prompt_tokens) for _ in range(args.runs)),
        "decode": {
            size: max(
                _decode(engine, size, args.context_tokens, args.output_tokens)
                for _ in range(args.runs)
            )
            for size in BATCH_SIZES
        },
    }
    sys.stdout.write("FIGURES " + json.dumps(figures) + "\n")
    sys.stdout.flush()


def _prefill(engine: Engine, num_tokens: int) -> float:
    start = now()
    times = engine([prompt(num_tokens)], 1)
    return num_tokens / (times[0][0] - start)


def _decode(engine: Engine, size: int, context_tokens: int, num_tokens: int) -> float:
    """Tokens per second of all streams, while all of them run."""
    while True:
        times = engine([prompt(context_tokens) for _ in range(size)], num_tokens)
        begin, end = max(each[0] for each in times), min(each[-1] for each in times)
        made = sum(begin < at <= end for each in times for at in each)
        if made >= size * _FEWEST_STEPS:
            return made / (end - begin)
        # The first ended before, or soon after, the last began.
        num_tokens *= 2
