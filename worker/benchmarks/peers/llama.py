"""llama.cpp's server inside this process (xllamacpp), continuous batching over slots."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import figures
import xllamacpp

_NUM_SLOTS = max(figures.BATCH_SIZES)


class Llama:
    """The server; one thread waits for each stream."""

    def __init__(self, args: Any) -> None:  # Any: argparse's namespace
        params = xllamacpp.CommonParams()
        params.model.path = args.model
        params.n_parallel = _NUM_SLOTS
        params.n_ctx = _NUM_SLOTS * (args.prompt_tokens + args.output_tokens + 64)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
        # Its AMX buffers crash on some machines (llama.cpp#20824).
        params.no_extra_bufts = "amx_int8" in Path("/proc/cpuinfo").read_text()
        params.cache_prompt = False
        params.verbosity = 0
        self._server = xllamacpp.Server(params)

    def __call__(self, prompts: list[list[int]], num_tokens: int) -> figures.Times:
        """Generate; see figures.py."""
        times: list[list[float]] = [[] for _ in prompts]
        threads = [
            threading.Thread(target=self._stream, args=(ids, num_tokens, each))
            for ids, each in zip(prompts, times, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return times

    def _stream(self, ids: list[int], num_tokens: int, times: list[float]) -> None:
        def take(event: Any) -> bool:
            if not event["choices"][0]["finish_reason"]:
                times.append(figures.now())
            return False

        request = {
            "prompt": ids,
            "max_tokens": num_tokens,
            "temperature": figures.TEMPERATURE,
            "top_p": figures.TOP_P,
            "top_k": 0,
            "min_p": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": True,
        }
        self._server.handle_completions(request, take)


def main() -> None:
    """Measure it."""
    args = figures.arguments()
    started = time.perf_counter()
    figures.measure(Llama(args), args, time.perf_counter() - started)
    sys.stderr.flush()
    # The server's own threads do not always end.
    os._exit(0)


if __name__ == "__main__":
    main()
