"""What the trained classifiers cost: ``python guard/benchmarks/bench_models.py [--embedding DIR]``.

The fast stage is what every text pays: reading the text, features, all heads. The guard's goal is a
p99 of 3 ms at 500 tokens and 8 ms at 2,000 for everything but the embedding. Times are CPU times of
this process, so that other load counts less; the last column is the ratio to the fast stage at 500
tokens.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from headrace_guard.classifiers.artefact import Artefact, load_packaged
from headrace_guard.classifiers.cuts import read
from headrace_guard.classifiers.embedding import Embedder
from headrace_guard.classifiers.heads import HEADS

_SENTENCE = (
    "The quick delegation asked, politely, whether all 14 parts of the plan were still due. "
)
_CHARS_A_TOKEN = 4


def main() -> None:
    """Print one line a stage and length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--embedding", type=Path, help="folder of the embedding model")
    parser.add_argument("--repeats", type=int, default=300)
    given = parser.parse_args()
    artefact = load_packaged()
    base = 0.0
    embedder = None if given.embedding is None else Embedder(given.embedding)
    for num_tokens in (50, 500, 2000):
        size = num_tokens * _CHARS_A_TOKEN
        text = (_SENTENCE * (size // len(_SENTENCE) + 1))[:size]
        p50, p99 = _time(partial(_look, artefact, text), given)
        base = p50 if num_tokens == 500 else base
        _say(f"fast stage, {num_tokens} tokens", p50, p99, base)
    if embedder is not None:
        words = partial(_look_at_words, artefact, embedder, _SENTENCE * 5)
        _say("words stage, a window of 400 characters", *_time(words, given), base)
        given.repeats = max(20, given.repeats // 10)
        for num_windows in (1, 3):
            windows = [_SENTENCE * 5] * num_windows
            p50, p99 = _time(partial(_look_closer, artefact, embedder, windows), given)
            _say(f"embedding stage, {num_windows} windows of 400 characters", p50, p99, base)


def _look(artefact: Artefact, text: str) -> object:
    return artefact.linear.peaks(read(text), frozenset(HEADS))


def _look_at_words(artefact: Artefact, embedder: Embedder, window: str) -> object:
    return artefact.words.logits(embedder.pieces(window))


def _look_closer(artefact: Artefact, embedder: Embedder, windows: list[str]) -> object:
    return [artefact.dense.logits(embedder.look(window)) for window in windows]


def _time(work: Callable[[], object], given: argparse.Namespace) -> tuple[float, float]:
    work()
    took = []
    for _ in range(given.repeats):
        started = time.process_time_ns()
        work()
        took.append((time.process_time_ns() - started) / 1e6)
    return float(np.percentile(took, 50)), float(np.percentile(took, 99))


def _say(what: str, p50_ms: float, p99_ms: float, base_ms: float) -> None:
    ratio = f"{p50_ms / base_ms:8.2f}" if base_ms else "       -"
    sys.stdout.write(f"{what:42} p50 {p50_ms:8.3f} ms  p99 {p99_ms:8.3f} ms  ratio {ratio}\n")


if __name__ == "__main__":
    main()
