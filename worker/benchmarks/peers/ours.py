"""Headrace's own engine: scheduling, paging and sampling, without the network."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path

import figures

from headrace_common.blocks import chain_key
from headrace_worker.engine.direct import DirectEngine, limits_for
from headrace_worker.engine.request import Request, SamplingParams, StopParams
from headrace_worker.kernels.rounding import Rounding
from headrace_worker.model_host import ModelHost
from headrace_worker.settings import default_cache_dir

_KV_TOKENS = 16_384
# Prompts are not held back for the sake of streams that run: the others do not do that either, and
# the first streams would end before the last begin.
_NO_PACE = 1e9


class Ours:
    """A running engine; see figures.py."""

    def __init__(self, engine: DirectEngine) -> None:
        self._engine, self._keys = engine, count(1)

    def __call__(self, prompts: list[list[int]], num_tokens: int) -> figures.Times:
        """Generate."""
        times: dict[int, list[float]] = {}
        for ids in prompts:
            key = next(self._keys)
            times[key] = []
            self._engine.submit(_request(key, ids, num_tokens))
        num_open = len(times)
        while num_open:
            _, output = self._engine.next()
            at = figures.now()
            times[output.key] += [at for choice in output.choices for _ in choice.tokens]
            num_open -= output.is_last
        return list(times.values())


def _request(key: int, ids: list[int], num_tokens: int) -> Request:
    return Request(
        key=key,
        request_id=f"bench-{key}",
        prompt_token_ids=ids,
        sampling=SamplingParams(temperature=figures.TEMPERATURE, top_p=figures.TOP_P),
        stopping=StopParams(max_tokens=num_tokens),
        seed=key,
        chain_key=chain_key("bench"),
        skip_prefix_cache=True,
    )


def main() -> None:
    """Measure one rounding, named behind the model: MODEL:int16."""
    args = figures.arguments()
    path, _, name = args.model.rpartition(":")
    started = time.perf_counter()
    rounding = Rounding[name.upper()]
    model = ModelHost(Path(path), default_cache_dir(), _KV_TOKENS, args.threads, rounding).load()
    with DirectEngine(model, limits_for(model, slowdown_ratio=_NO_PACE)) as engine:
        figures.measure(Ours(engine), args, time.perf_counter() - started)


if __name__ == "__main__":
    main()
