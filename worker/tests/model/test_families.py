"""Every family against transformers, on tiny random checkpoints, and both ways to compute a token.

Tolerance: logits of order one agree to 2e-4 in float32, over contexts longer than the windows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace_testing.tiny_model import TOKENS, tiny_tokenizer
from headrace_worker.model.runner import ModelRunner, Row

_SIZES: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 21}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "head_dim": None}),
    "qwen2-window": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 17,
            "max_window_layers": 1,
            "head_dim": None,
        },
    ),
    "qwen3": ("qwen3", {"tie_word_embeddings": False, "head_dim": 32}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": 16,
            "layer_types": [_SLIDING, _FULL, _SLIDING],
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                _SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}


def make(folder: Path, family: str) -> Any:
    """Write a random checkpoint; return transformers' model of it."""
    kind, changes = FAMILIES[family]
    values = {key: value for key, value in {**_SIZES, **changes}.items() if value is not None}
    config = transformers.AutoConfig.for_model(kind, **values)
    config._attn_implementation = "eager"
    torch.manual_seed(len(family))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        # Norms and biases start at one and zero, which would hide what is done with them.
        for name, weight in model.named_parameters():
            if name.endswith(("norm.weight", "layernorm.weight", "bias")):
                weight.add_(torch.randn_like(weight) * 0.25)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tiny_tokenizer().to_str(), encoding="utf-8")
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_transformers(tmp_path: Path, family: str) -> None:
    """A whole prompt, the same in chunks, and token by token, by torch and by the C kernels."""
    reference = make(tmp_path, family)
    ids = [(7 * i * i + 3) % len(TOKENS) for i in range(70)]
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.3
    table = [5, 0, 3, 1, 7]
    for backend in ("torch", "cpu"):
        runner = ModelRunner(tmp_path, num_blocks=8, backend=backend)
        whole = runner.forward([Row(ids, 0, table, len(ids))])
        torch.testing.assert_close(whole, expected, atol=2e-4, rtol=2e-4)
        parts = [
            runner.forward([Row(ids[start:end], start, table, end - start)])
            for start, end in ((0, 40), (40, 60), (60, 61), (61, 66), (66, 70))
        ]
        torch.testing.assert_close(torch.cat(parts), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", ["llama-yarn", "mistral-window", "gemma2", "gemma3"])
def test_what_a_family_adds_changes_the_result(tmp_path: Path, family: str) -> None:
    """The options that the test above compares are not ones that do nothing."""
    make(tmp_path, family)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    ids = [(5 * i + 3) % len(TOKENS) for i in range(70)]
    with_them = ModelRunner(tmp_path, num_blocks=8).forward([Row(ids, 0, list(range(5)), 1)])
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "rope_parameters"):
        values.pop(name, None)
    values |= {"layer_types": None, "sliding_window": None}
    path.write_text(json.dumps(values))
    without = ModelRunner(tmp_path, num_blocks=8).forward([Row(ids, 0, list(range(5)), 1)])
    assert (with_them - without).abs().max() > 0.02


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_hidden_states_agree_with_transformers(tmp_path: Path, family: str) -> None:
    """What embeddings are made of is the state behind the last norm."""
    reference = make(tmp_path, family)
    ids = [(3 * i * i + 1) % len(TOKENS) for i in range(40)]
    with torch.no_grad():
        expected = reference.model(torch.tensor([ids])).last_hidden_state[0]
    runner = ModelRunner(tmp_path, num_blocks=8)
    hidden = runner.hidden([Row(ids[:25], 0, [4, 2, 6], 25), Row(ids, 0, [1, 0, 3], 1)])
    torch.testing.assert_close(hidden[:25], expected[:25], atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(hidden[25], expected[-1], atol=2e-4, rtol=2e-4)
