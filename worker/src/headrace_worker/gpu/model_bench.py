"""Whole models of random weights on a GPU: a decode step against its floor, tokens per second."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from headrace_common.blocks import BLOCK_SIZE_TOKENS, chain_key
from headrace_worker.engine.direct import DirectEngine, limits_for
from headrace_worker.engine.request import Request, SamplingParams, StopParams
from headrace_worker.engine.token_table import TokenTable
from headrace_worker.gpu.operands import random_model
from headrace_worker.gpu.roofline import Roofline, decode_step
from headrace_worker.model.config import ModelConfig
from headrace_worker.model.runner import ModelRunner, Row
from headrace_worker.model.weights import LoadedModel, Placement
from headrace_worker.model_host import ReadyModel
from headrace_worker.sampling import SampleSpec

# Llama 3 8B.
LARGE = ModelConfig(
    architecture="llama",
    num_layers=32,
    hidden_size=4096,
    ffn_size=14_336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128_256,
    context_tokens=8192,
    rope_theta=500_000.0,
    rms_eps=1e-5,
    is_head_tied=False,
    eos_token_ids=(),
)
GOAL_RATIO = 0.75
_RUNS = 15


@dataclass(frozen=True)
class Load:
    """What is measured.

    Attributes:
        batches: rows of a decode step.
        context_tokens: of each row there.
        num_requests: through the whole engine, all at once.
        prompt_tokens: of each.
        output_tokens: of each.
        token_budget: of a step of the engine.
    """

    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    context_tokens: int = 1024
    num_requests: int = 128
    prompt_tokens: int = 512
    output_tokens: int = 128
    token_budget: int = 4096


@dataclass(frozen=True)
class StepTime:
    """A decode step of one batch size. Seconds as the caller waits, drawing tokens included.

    Attributes:
        recorded_s: played from a recording.
        eager_s: launched operation by operation.
        model_s: the recorded part without drawing.
        floor_s: what the device's limits allow for the model.
        ratio: floor_s / model_s.
    """

    batch: int
    recorded_s: float
    eager_s: float
    model_s: float
    floor_s: float
    ratio: float


def decode_steps(
    model: LoadedModel, placement: Placement, load: Load, limits: Roofline
) -> list[StepTime]:
    """Time decode steps of random tokens at random places of the pool."""
    blocks_each = load.context_tokens // BLOCK_SIZE_TOKENS + 1
    num_blocks = max(load.batches) * blocks_each
    recorded, eager = (
        ModelRunner(model, num_blocks, backend="triton", placement=each)
        for each in (placement, replace(placement, records_decodes=False))
    )
    order = torch.randperm(num_blocks).tolist()
    results = []
    for batch in load.batches:
        rows = [
            Row(
                [idx % model.config.vocab_size],
                load.context_tokens - 1,
                order[idx * blocks_each : (idx + 1) * blocks_each],
                1,
            )
            for idx in range(batch)
        ]
        specs = [SampleSpec(temperature=0.8, top_p=0.95, seed=idx) for idx in range(batch)]
        floor_s = limits.floor_s(decode_step(model.config, [load.context_tokens] * batch))
        model_s = _waited_s(recorded, rows, [])
        results.append(
            StepTime(
                batch,
                recorded_s=_waited_s(recorded, rows, specs),
                eager_s=_waited_s(eager, rows, specs),
                model_s=model_s,
                floor_s=floor_s,
                ratio=floor_s / model_s,
            )
        )
    return results


def _waited_s(runner: ModelRunner, rows: list[Row], specs: list[SampleSpec]) -> float:
    times = []
    for _ in range(_RUNS):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        logits = runner.forward(rows)
        if specs:
            runner.sample(logits, specs)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started_s)
    # The first runs compile and record.
    return median(times[3:])


@dataclass(frozen=True)
class EngineRates:
    """The whole engine under requests that all come at once.

    Attributes:
        output_tokens_per_s: from the first request's submission to the last token.
        total_tokens_per_s: prompts counted as well.
        first_token_s: median wait for a first token.
    """

    output_tokens_per_s: float
    total_tokens_per_s: float
    first_token_s: float


def engine_rates(model: LoadedModel, placement: Placement, load: Load) -> EngineRates:
    """Run all requests through scheduling, paging, sampling and detokenising."""
    blocks_each = (load.prompt_tokens + load.output_tokens) // BLOCK_SIZE_TOKENS + 2
    num_blocks = load.num_requests * blocks_each
    runner = ModelRunner(model, num_blocks, backend="triton", placement=placement)
    ready = ReadyModel(model.info, runner, TokenTable({}, frozenset()), num_blocks)
    limits = limits_for(ready, load.token_budget, load.num_requests)
    with DirectEngine(ready, limits) as engine:
        # Compiles kernels and records the sizes that the measured run goes through.
        _run(engine, load, range(load.num_requests))
        return _run(engine, load, range(load.num_requests, 2 * load.num_requests))


def _run(engine: DirectEngine, load: Load, keys: range) -> EngineRates:
    started_s = time.perf_counter()
    submitted = {key: engine.submit(_request(load, key)) for key in keys}
    first: dict[int, float] = {}
    num_open, num_tokens, ended_s = len(submitted), 0, started_s
    while num_open:
        ended_s, output = engine.next()
        num_made = sum(len(part.tokens) for part in output.choices)
        if num_made:
            first.setdefault(output.key, ended_s - submitted[output.key])
        num_tokens += num_made
        num_open -= output.is_last
    took_s = ended_s - started_s
    prompts = load.prompt_tokens * len(submitted)
    return EngineRates(num_tokens / took_s, (num_tokens + prompts) / took_s, median(first.values()))


def _request(load: Load, key: int) -> Request:
    return Request(
        key=key,
        request_id=f"bench-{key}",
        prompt_token_ids=[(31 * key + 7 * idx) % 250 for idx in range(load.prompt_tokens)],
        sampling=SamplingParams(temperature=0.8, top_p=0.95),
        stopping=StopParams(max_tokens=load.output_tokens),
        seed=key,
        chain_key=chain_key("bench"),
        skip_prefix_cache=True,
    )


def large_model(placement: Placement) -> LoadedModel:
    """Draw the weights of a model of eight billion."""
    return random_model(LARGE, placement)
