"""Do workers of one machine use all of its cores, and leave them to one another?

``python worker/benchmarks/bench_threads.py [MODEL.gguf] [--seconds 4] [--workers 2]`` lets workers
compute with one thread each and with as many as there are cores, and prints tokens per second of

- one worker, its neighbours idle: a stream by itself, and a prompt of 512 tokens;
- all workers at once, four streams each,

and the ratios. Exit code 1 = with all threads, one stream or the prompt are not faster by a tenth,
or all workers at once are slower by more than a twentieth.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from headrace_worker.kernels.rounding import Rounding
from headrace_worker.model.loader import load_model
from headrace_worker.model.runner import ModelRunner, Row
from headrace_worker.prepare import ensure_prepared
from headrace_worker.settings import default_cache_dir

_CONTEXT_TOKENS, _PROMPT_TOKENS = 128, 512
_STREAMS = 4
_S = 16
_FASTER, _NOT_SLOWER = 1.1, 0.95
_WAIT_S = 300.0


def main() -> int:
    """Measure; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    home = default_cache_dir().parent / "models"
    parser.add_argument(
        "model", type=Path, nargs="?", default=home / "SmolLM2-135M-Instruct.Q4_1.gguf"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    folder, cores = ensure_prepared(args.model, default_cache_dir()), len(os.sched_getaffinity(0))
    one, all_cores = (
        _figures(folder, num_threads, args.workers, args.seconds) for num_threads in (1, cores)
    )
    names = ("one stream", "prompt", f"{args.workers} workers at once")
    ratios = [of_all / of_one for of_one, of_all in zip(one, all_cores, strict=True)]
    lines = [f"tokens/s with 1 and with {cores} threads a worker"]
    for name, of_one, of_all, ratio in zip(names, one, all_cores, ratios, strict=True):
        lines.append(f"{name:20} {of_one:7.1f} {of_all:7.1f}  {ratio:.2f}x")
    sys.stdout.write("\n".join(lines) + "\n")
    return int(cores > 1 and (min(ratios[:2]) < _FASTER or ratios[2] < _NOT_SLOWER))


def _figures(folder: Path, num_threads: int, num_workers: int, seconds: float) -> list[float]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(num_workers):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_work, args=(theirs, folder, num_threads)))
        pipes.append(ours)
        processes[-1].start()
    try:
        for pipe in pipes:
            _answer(pipe)
        alone = [sum(_rates(pipes[:1], job, seconds)) for job in ("stream", "prompt")]
        return [*alone, sum(_rates(pipes, "streams", seconds))]
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _rates(pipes: Sequence[Connection], job: str, seconds: float) -> list[float]:
    for pipe in pipes:
        pipe.send((job, seconds))
    return [_answer(pipe) for pipe in pipes]


def _answer(pipe: Connection) -> float:
    if not pipe.poll(_WAIT_S):
        sys.exit("a worker does not answer")
    rate: float = pipe.recv()
    return rate


def _work(pipe: Connection, folder: Path, num_threads: int) -> None:
    """Compute what comes through the pipe; the first answer means ready."""
    num_blocks = max(_STREAMS * (_CONTEXT_TOKENS // _S + 1), _PROMPT_TOKENS // _S)
    runner = ModelRunner(
        load_model(folder), num_blocks, num_threads=num_threads, rounding=Rounding.INT16
    )
    streams = [
        Row([7 + idx], _CONTEXT_TOKENS, range(idx * 9, idx * 9 + 9), 1) for idx in range(_STREAMS)
    ]
    prompt = [
        Row([13 * idx % 1000 for idx in range(_PROMPT_TOKENS)], 0, range(_PROMPT_TOKENS // _S), 1)
    ]
    jobs = {"stream": streams[:1], "streams": streams, "prompt": prompt}
    for rows in jobs.values():
        runner.forward(rows)
    pipe.send(0.0)
    while True:
        job, seconds = pipe.recv()
        rows, num_tokens = jobs[job], 0
        begin_s = time.perf_counter()
        while time.perf_counter() < begin_s + seconds:
            runner.forward(rows)
            num_tokens += sum(len(row.token_ids) for row in rows)
        pipe.send(num_tokens / (time.perf_counter() - begin_s))


if __name__ == "__main__":
    sys.exit(main())
