"""The real model against transformers: tests/golden/greedy_smollm2.json, see worker/golden.

All prompts run once, mixed in one continuous batch of chunks and decodes; a few run again alone and
in other chunk sizes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from tokenizers import Tokenizer

from headrace_testing import golden_matrix
from headrace_worker.engine.token_table import TokenTable
from headrace_worker.model.loader import load_model
from headrace_worker.model.runner import ModelRunner, Row
from headrace_worker.model.weights import LoadedModel
from headrace_worker.model_host import ReadyModel
from headrace_worker.prepare import ensure_prepared

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

GOLDEN = Path(__file__).parents[3] / "tests" / "golden" / "greedy_smollm2.json"
S = 16
NUM_BLOCKS = 700
MAX_KL = 1e-4
NUM_MATRIX_TOKENS = 6
MATRIX_WAYS = {"cache hits", "chunks of 16", "preempted", "resumed at random"}


@dataclass
class Run:
    """One prompt on its way."""

    prompt: list[int]
    table: list[int]
    output: list[int] = field(default_factory=list)
    num_done: int = 0
    first_logits: torch.Tensor | None = None


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return values


@pytest.fixture(scope="module")
def model(smollm2_gguf: Path) -> LoadedModel:
    # Where workers keep it by default, so that it is prepared once on a machine.
    return load_model(ensure_prepared(smollm2_gguf, smollm2_gguf.parents[1] / "prepared"))


@pytest.fixture(scope="module", params=["cpu", "torch"])
def runner(model: LoadedModel, request: pytest.FixtureRequest) -> ModelRunner:
    """Run once with the compiled kernels, once without."""
    return ModelRunner(model, NUM_BLOCKS, backend=request.param)


def generate(
    runner: ModelRunner, cases: Iterable[dict[str, Any]], num_tokens: int, chunk: int
) -> list[Run]:
    """Decode all greedily, every step taking a token or a chunk of each unfinished prompt."""
    runs, next_block = [], 0
    for case in cases:
        prompt = case["prompt_token_ids"]
        num_blocks = -(-(len(prompt) + num_tokens) // S)
        runs.append(Run(prompt, list(range(next_block, next_block + num_blocks))))
        next_block += num_blocks
    assert next_block <= NUM_BLOCKS
    ends = runner.info.eos_token_ids
    unfinished = runs
    while unfinished:
        step(runner, unfinished, chunk)
        unfinished = [
            run
            for run in unfinished
            if len(run.output) < num_tokens and not {*run.output[-1:]}.intersection(ends)
        ]
    return runs


def step(runner: ModelRunner, runs: list[Run], chunk: int) -> None:
    rows = []
    for run in runs:
        tokens = (run.prompt + run.output)[run.num_done :][:chunk]
        is_last = run.num_done + len(tokens) == len(run.prompt) + len(run.output)
        rows.append(Row(tokens, run.num_done, run.table, int(is_last)))
        run.num_done += len(tokens)
    logits = iter(runner.forward(rows))
    for run, row in zip(runs, rows, strict=True):
        if row.num_logits:
            row_logits = next(logits)
            if run.first_logits is None:
                run.first_logits = row_logits.clone()
            run.output.append(int(row_logits.argmax()))


def test_model_file_is_the_one_of_the_golden_run(
    smollm2_gguf: Path, golden: dict[str, Any]
) -> None:
    """Any other file would make the tests below mean nothing."""
    assert hashlib.sha256(smollm2_gguf.read_bytes()).hexdigest() == golden["gguf_sha256"]


def test_greedy_output_equals_the_reference(runner: ModelRunner, golden: dict[str, Any]) -> None:
    """Fifty prompts in one continuous batch give token for token what transformers gives.

    Every fourth of them without the compiled kernels, which takes several times as long.
    """
    cases = golden["cases"]
    assert len(cases) == 50
    if not runner.uses_compiled_kernels:
        cases = cases[::4]
    runs = generate(runner, cases, golden["max_new_tokens"], chunk=64)
    wrong = [
        case["text"][:50]
        for case, run in zip(cases, runs, strict=True)
        if run.output != case["output_token_ids"]
    ]
    assert wrong == []
    worst = max(
        golden_matrix.kl_of_top(case["first_top_logprobs"], run.first_logits)
        for case, run in zip(cases, runs, strict=True)
        if run.first_logits is not None
    )
    assert worst < MAX_KL


def test_no_way_of_making_a_text_changes_it(
    model: LoadedModel, runner: ModelRunner, golden: dict[str, Any]
) -> None:
    """A slice of worker/benchmarks/golden_matrix.py: the same tokens, and logits within 1e-6."""
    chosen = [case for case in golden["cases"] if len(case["prompt_token_ids"]) < 100][::7]
    prompts = [case["prompt_token_ids"] for case in chosen]
    table = TokenTable.from_json(model.info.tokenizer_json)
    ready = ReadyModel(model.info, runner, table, NUM_BLOCKS)
    alone = golden_matrix.make(ready, prompts, NUM_MATRIX_TOKENS, golden_matrix.ALONE)
    assert alone.tokens == [case["output_token_ids"][:NUM_MATRIX_TOKENS] for case in chosen]
    is_fast = runner.uses_compiled_kernels
    wanted = MATRIX_WAYS if is_fast else {"chunks of 16"}
    ways = [way for way in golden_matrix.WAYS if way.name in wanted]
    differences = {it.way: it for it in golden_matrix.all_ways(ready, prompts, alone, ways)}
    assert differences.keys() == wanted
    for it in differences.values():
        assert it.num_equal == it.num_texts == len(prompts) >= 5
        assert it.max_kl < 1e-6
    if is_fast:
        assert differences["cache hits"].cached_tokens > 0
        assert differences["preempted"].num_preempted > 0


def test_tokenizer_equals_the_reference(model: LoadedModel, golden: dict[str, Any]) -> None:
    """Ids of all texts and prompts equal transformers' tokenizer's."""
    tokenizer = Tokenizer.from_str(model.info.tokenizer_json.decode())
    pairs = [(entry["text"], entry["token_ids"]) for entry in golden["tokenizer"]]
    pairs += [(case["text"], case["prompt_token_ids"]) for case in golden["cases"]]
    assert len(pairs) >= 85
    wrong = [
        text for text, ids in pairs if tokenizer.encode(text, add_special_tokens=False).ids != ids
    ]
    assert wrong == []
    decoded = [tokenizer.decode(ids, skip_special_tokens=False) for _, ids in pairs]
    assert decoded == [text for text, _ in pairs]


def test_chat_template_renders_as_the_reference_does(
    model: LoadedModel, golden: dict[str, Any]
) -> None:
    """The template out of the file gives the prompt that transformers rendered."""
    environment = jinja2.Environment(autoescape=False)
    template = environment.from_string(model.info.chat_template)
    chats = [case for case in golden["cases"] if case["kind"] == "chat"]
    assert len(chats) >= 20
    for case in chats:
        text = template.render(messages=case["messages"], add_generation_prompt=True)
        assert text == case["text"]


def test_info_of_the_real_model(model: LoadedModel, golden: dict[str, Any]) -> None:
    """Limits and ids as the model's makers gave them."""
    info = model.info
    assert (info.context_tokens, info.vocab_size) == (8192, 49152)
    assert list(info.eos_token_ids) == golden["eos_token_ids"]
    assert (info.bos_token_id, info.add_bos) == (1, False)
    assert info.kv_bytes_per_token == 46_080
    assert info.special_tokens["eos_token"] == "<|im_end|>"
