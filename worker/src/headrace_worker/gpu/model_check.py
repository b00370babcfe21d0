"""Sampling and whole tiny models on a device against plain torch on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from headrace_common.blocks import BLOCK_SIZE_TOKENS, chain_key
from headrace_worker import sampling
from headrace_worker.engine.direct import DirectEngine, limits_for
from headrace_worker.engine.request import Request, SamplingParams, StopParams
from headrace_worker.engine.token_table import TokenTable
from headrace_worker.gpu.kernel_check import Check, demand
from headrace_worker.gpu.operands import Random, random_model
from headrace_worker.kernels.triton import sampler
from headrace_worker.kernels.triton.sampling import CANDIDATES
from headrace_worker.model.config import GELU_TANH, ModelConfig
from headrace_worker.model.runner import ModelRunner, Row
from headrace_worker.model.weights import ON_CPU, LoadedModel, Placement, placed
from headrace_worker.model_host import ReadyModel
from headrace_worker.sampling import SampleSpec

_PLAIN = ModelConfig(
    architecture="llama",
    num_layers=2,
    hidden_size=64,
    ffn_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=300,
    context_tokens=512,
    rope_theta=10_000.0,
    rms_eps=1e-5,
    is_head_tied=True,
    eos_token_ids=(),
)
FAMILIES: dict[str, ModelConfig] = {
    "llama": _PLAIN,
    "qwen2": replace(_PLAIN, architecture="qwen2", has_qkv_bias=True, is_head_tied=False),
    "qwen3": replace(_PLAIN, architecture="qwen3", has_qk_norm=True, head_dim=32),
    "mistral": replace(
        _PLAIN, architecture="mistral", window_tokens=21, windowed_layers=(True, True)
    ),
    "gemma2": replace(
        _PLAIN,
        architecture="gemma2",
        has_post_norms=True,
        activation=GELU_TANH,
        embedding_scale=8.0,
        attention_soft_cap=5.0,
        logit_soft_cap=3.0,
        window_tokens=16,
        windowed_layers=(True, False),
    ),
    "gemma3": replace(
        _PLAIN,
        architecture="gemma3",
        has_post_norms=True,
        has_qk_norm=True,
        activation=GELU_TANH,
        embedding_scale=8.0,
        window_tokens=16,
        windowed_layers=(True, False),
        local_rope_theta=1e3,
    ),
}
# Largest distance of logits, of order one, to float32 on the CPU.
_LOGPROB_TOLERANCE = 1e-3
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.15}


@dataclass(frozen=True)
class ModelSizes:
    """How much is computed.

    Attributes:
        families: which of `FAMILIES`.
        vocabularies: widths of rows that are sampled from.
        num_draws: rows of each.
        num_candidates: that truncation looks at.
        batches: sizes of decode steps that are recorded; empty = nothing is.
        num_prompts: through the engine.
        num_tokens: of each output.
    """

    families: Sequence[str]
    vocabularies: Sequence[int]
    num_draws: int
    num_candidates: int
    batches: Sequence[int]
    num_prompts: int
    num_tokens: int


ON_GPU = ModelSizes(
    families=tuple(FAMILIES),
    vocabularies=(300, 49_152, 128_256, 151_936, 262_144),
    num_draws=48,
    num_candidates=CANDIDATES,
    batches=(1, 2, 3, 7, 8, 9, 33, 64, 70),
    num_prompts=24,
    num_tokens=24,
)


def model_checks(device: torch.device, sizes: ModelSizes) -> Iterator[Check]:
    """Yield all of them."""
    for vocab in sizes.vocabularies:
        run = partial(check_sampler, device, vocab, sizes)
        yield Check(f"sampling from {vocab} tokens as plain torch does", run)
    for family in sizes.families:
        for dtype in _TOLERANCE if device.type == "cuda" else (torch.float32,):
            kind = str(dtype).removeprefix("torch.")
            placement = Placement(str(device), dtype)
            yield Check(f"logits of {family}, {kind}", partial(_logits, family, placement))
        run = partial(_engine, family, Placement(str(device), torch.float32), sizes)
        yield Check(f"texts of {family} by the whole engine", run)
        if sizes.batches:
            run = partial(check_graphs, family, Placement(str(device), torch.float32), sizes)
            yield Check(f"recorded decode steps of {family}", run)


def specs_for(number: int, vocab: int) -> list[SampleSpec]:
    """Every kind of parameter, in turn."""
    counts = Counter({3: 2, vocab - 1: 1, 7: 4})
    kinds = [
        SampleSpec(),
        SampleSpec(temperature=1.0),
        SampleSpec(temperature=0.7, top_k=50),
        SampleSpec(temperature=1.0, top_p=0.9),
        SampleSpec(temperature=1.2, min_p=0.05),
        SampleSpec(temperature=0.8, top_k=40, top_p=0.95, min_p=0.01),
        SampleSpec(temperature=1.0, repetition_penalty=1.3, prompt_counts=counts, top_p=0.8),
        SampleSpec(temperature=1.0, frequency_penalty=0.5, output_counts=counts, top_k=9),
        SampleSpec(logit_bias={5: 100.0}),
        SampleSpec(temperature=1.0, forbidden_token_ids=(0, 1, 2)),
        SampleSpec(temperature=1.0, allowed_token_ids=(4, 9, vocab - 1)),
    ]
    return [
        replace(kinds[idx % len(kinds)], seed=idx, position=idx % 5, num_top_logprobs=idx % 4)
        for idx in range(number)
    ]


def check_sampler(device: torch.device, vocab: int, sizes: ModelSizes) -> None:
    """Compare tokens and log probabilities, and that the logits are left as they were."""
    number = sizes.num_draws
    logits = 3 * Random(device, torch.float32).normal(number, vocab)
    before = logits.clone()
    specs = specs_for(number, vocab)
    result = sampler.sample(logits, specs, sizes.num_candidates)
    demand(torch.equal(logits, before), "the logits were changed")
    expected = sampling.sample(before.cpu(), specs)
    different = [idx for idx in range(number) if result[idx].token_id != expected[idx].token_id]
    demand(not different, f"other tokens: {[(i, specs[i]) for i in different[:3]]}")
    for one, two in zip(result, expected, strict=True):
        distance = abs((one.logprob or 0.0) - (two.logprob or 0.0))
        demand(distance < _LOGPROB_TOLERANCE, f"a log probability is {distance} off")


def _runners(family: str, placement: Placement, num_blocks: int) -> tuple[ModelRunner, ModelRunner]:
    """Return the same random model on plain torch, and on the Triton kernels."""
    model = random_model(FAMILIES[family], ON_CPU)
    weights = placed(model.weights, placement)
    there = LoadedModel(model.config, weights, model.info)
    twin = ModelRunner(model, num_blocks, backend="torch")
    return twin, ModelRunner(there, num_blocks, backend="triton", placement=placement)


def _logits(family: str, placement: Placement) -> None:
    """A prompt, then a chunk beside a decode, then a copied block."""
    twin, runner = _runners(family, placement, 12)
    ids = [(7 * i * i + 3) % FAMILIES[family].vocab_size for i in range(60)]
    steps = [
        [Row(ids[:40], 0, [5, 2, 9], 40)],
        [Row(ids[40:41], 40, [5, 2, 9], 1), Row(ids[:30], 0, [1, 7], 30)],
        [Row(ids[41:42], 41, [5, 2, 9], 1), Row(ids[30:31], 30, [1, 7], 1)],
    ]
    tolerance = _TOLERANCE[placement.dtype]
    for rows in steps:
        expected, result = twin.forward(rows), runner.forward(rows).cpu()
        torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)
    for each in (twin, runner):
        each.copy_block(9, 4)
    rows = [Row([9], 42, [5, 2, 4], 1)]
    expected, result = twin.forward(rows), runner.forward(rows).cpu()
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)


def _engine(family: str, placement: Placement, sizes: ModelSizes) -> None:
    """Greedy and drawn texts of prompts that share beginnings, in a pool that runs short."""
    longest = 8 + 5 * sizes.num_prompts + sizes.num_tokens
    num_blocks = 4 * (longest // BLOCK_SIZE_TOKENS + 1)
    texts = [
        _texts(ReadyModel(runner.info, runner, TokenTable({}, frozenset()), num_blocks), sizes)
        for runner in _runners(family, placement, num_blocks)
    ]
    different = [key for key, text in texts[0].items() if texts[1][key] != text]
    demand(not different, f"other texts after prompts {different}")


def _texts(model: ReadyModel, sizes: ModelSizes) -> dict[int, list[int]]:
    vocab = model.info.vocab_size
    texts: dict[int, list[int]] = {key: [] for key in range(sizes.num_prompts)}
    with DirectEngine(model, limits_for(model, token_budget=64, max_running=8)) as engine:
        for key in texts:
            ids = [(11 * idx * idx + 5 * (idx // 24) * key) % vocab for idx in range(8 + 5 * key)]
            engine.submit(
                Request(
                    key=key,
                    request_id=f"check-{key}",
                    prompt_token_ids=ids,
                    sampling=SamplingParams(
                        temperature=(0.0, 0.8)[key % 2], top_p=0.9, frequency_penalty=0.2
                    ),
                    stopping=StopParams(max_tokens=sizes.num_tokens),
                    seed=key,
                    chain_key=chain_key("check"),
                )
            )
        num_open = len(texts)
        while num_open:
            _, output = engine.next()
            for part in output.choices:
                texts[output.key] += [token.token_id for token in part.tokens]
            num_open -= output.is_last
    return texts


def check_graphs(family: str, placement: Placement, sizes: ModelSizes) -> None:
    """Play recorded steps of several sizes in turn and compare them with steps one by one."""
    num_blocks = 4 * max(sizes.batches)
    model = random_model(FAMILIES[family], placement)
    recorded, eager = (
        ModelRunner(model, num_blocks, backend="triton", placement=each)
        for each in (placement, replace(placement, records_decodes=False))
    )
    vocab = model.config.vocab_size
    for batch in (*sizes.batches, *sizes.batches):
        tables = [[4 * idx, 4 * idx + 1, 4 * idx + 2] for idx in range(batch)]
        prompts = [
            [(idx * idx + 7 * k) % vocab for k in range(1 + idx % 40)] for idx in range(batch)
        ]
        prefill = [Row(ids, 0, table, 1) for ids, table in zip(prompts, tables, strict=True)]
        decode = [
            Row([idx % vocab], len(ids), table, 1)
            for idx, (ids, table) in enumerate(zip(prompts, tables, strict=True))
        ]
        results = []
        for runner in (eager, recorded):
            runner.forward(prefill)
            results.append(runner.forward(decode).clone())
        torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-4)
    demand(bool(recorded.recorded_sizes), "nothing was recorded")
    demand(not eager.recorded_sizes, "the twin was recorded")
