"""The second real model, Gemma 3 270m, against transformers: tests/golden/greedy_gemma3.json.

Windows, norms behind both parts, scaled embeddings, K-quantised matrices and a SentencePiece
tokenizer, none of which SmolLM2 has. One prompt is longer than a window.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from headrace_testing import golden_matrix
from headrace_worker.engine.token_table import TokenTable
from headrace_worker.model.loader import load_model
from headrace_worker.model.runner import ModelRunner
from headrace_worker.model.weights import LoadedModel
from headrace_worker.model_host import ReadyModel
from headrace_worker.prepare import ensure_prepared

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

GOLDEN = Path(__file__).parents[3] / "tests" / "golden" / "greedy_gemma3.json"
NUM_BLOCKS = 512
MAX_KL = 1e-4


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return values


@pytest.fixture(scope="module")
def model(gemma3_gguf: Path, golden: dict[str, Any]) -> LoadedModel:
    assert hashlib.sha256(gemma3_gguf.read_bytes()).hexdigest() == golden["gguf_sha256"]
    return load_model(ensure_prepared(gemma3_gguf, gemma3_gguf.parents[1] / "prepared"))


def texts_of(model: LoadedModel, backend: str, cases: list[dict[str, Any]], num: int, way: str):
    runner = ModelRunner(model, NUM_BLOCKS, backend=backend)
    assert runner.uses_compiled_kernels == (backend == "cpu")
    table = TokenTable.from_json(model.info.tokenizer_json)
    ready = ReadyModel(model.info, runner, table, NUM_BLOCKS)
    (chosen,) = [it for it in golden_matrix.WAYS if it.name == way]
    return golden_matrix.make(ready, [case["prompt_token_ids"] for case in cases], num, chosen)


@pytest.mark.parametrize(
    ("backend", "way", "every"), [("cpu", "random batches", 1), ("torch", "chunks of 256", 6)]
)
def test_greedy_output_equals_the_reference(
    model: LoadedModel, golden: dict[str, Any], backend: str, way: str, every: int
) -> None:
    """By the whole engine, token for token; the first distributions within 1e-4 nats.

    Few of them without the compiled kernels, which takes several times as long.
    """
    cases = golden["cases"][::-every]
    num = golden["max_new_tokens"]
    texts = texts_of(model, backend, cases, num, way)
    assert max(len(case["prompt_token_ids"]) for case in cases) > 512
    wrong = [
        case["text"][:50]
        for case, made in zip(cases, texts.tokens, strict=True)
        if made[: len(case["output_token_ids"])] != case["output_token_ids"]
    ]
    assert wrong == []
    worst = max(
        golden_matrix.kl_of_top(case["first_top_logprobs"], torch.from_numpy(rows[0]))
        for case, rows in zip(cases, texts.logits, strict=True)
    )
    assert worst < MAX_KL


def test_tokenizer_equals_the_reference(model: LoadedModel, golden: dict[str, Any]) -> None:
    """Ids of all texts equal transformers' tokenizer's."""
    tokenizer = Tokenizer.from_str(model.info.tokenizer_json.decode())
    pairs = [(entry["text"], entry["token_ids"]) for entry in golden["tokenizer"]]
    assert len(pairs) >= 20
    # Longest runs first, as SentencePiece takes them; the reference does not, see make_gemma.py.
    pieces = tokenizer.encode(" " * 40 + "x", add_special_tokens=False).ids
    assert [len(tokenizer.decode([piece])) for piece in pieces] == [31, 9, 1]
    wrong = [
        text for text, ids in pairs if tokenizer.encode(text, add_special_tokens=False).ids != ids
    ]
    assert wrong == []


def test_it_is_a_base_model_whose_prompts_begin_with_its_mark(
    model: LoadedModel, golden: dict[str, Any]
) -> None:
    """No chat template; the begin-of-text id is to be prepended."""
    info = model.info
    assert info.chat_template == ""
    assert (info.bos_token_id, info.add_bos) == (golden["bos_token_id"], True)
    assert set(golden["eos_token_ids"]) <= {*info.eos_token_ids}
    assert model.config.window_tokens == 512
