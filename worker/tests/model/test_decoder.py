"""The paged Llama against a dense one written from the paper, in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_testing.tiny_model import TOKENS, TinyShape, write_hf_folder
from headrace_worker.model.runner import ModelRunner, Row

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def inverse_frequency(pair: int, shape: TinyShape) -> float:
    """Return the angle per position of one rotary pair, with scaling."""
    freq = shape.rope_theta ** (-2 * pair / shape.head_dim)
    rope = shape.rope or {"rope_type": "default"}
    if rope["rope_type"] == "linear":
        return freq / rope["factor"]
    if rope["rope_type"] == "llama3":
        wavelength = 2 * math.pi / freq
        original = rope["original_max_position_embeddings"]
        if wavelength < original / rope["high_freq_factor"]:
            return freq
        if wavelength > original / rope["low_freq_factor"]:
            return freq / rope["factor"]
        smooth = (original / wavelength - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"]
        )
        return (1 - smooth) * freq / rope["factor"] + smooth * freq
    return freq


def rotate(heads: torch.Tensor, shape: TinyShape) -> torch.Tensor:
    """Rotate (T, heads, D) as complex numbers."""
    half = shape.head_dim // 2
    freqs = torch.tensor([inverse_frequency(i, shape) for i in range(half)], dtype=torch.float64)
    angles = torch.outer(torch.arange(len(heads), dtype=torch.float64), freqs)
    turned = torch.complex(heads[..., :half], heads[..., half:]) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    return torch.cat((turned.real, turned.imag), dim=-1)


def dense_logits(
    weights: dict[str, torch.Tensor], shape: TinyShape, ids: list[int]
) -> torch.Tensor:
    """Return the logits after every token, (T, V)."""
    w = {name: value.double() for name, value in weights.items()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + shape.rms_eps).sqrt()
        return x / scale * w[name]

    x = w["model.embed_tokens.weight"][ids]
    future = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    for idx in range(shape.num_layers):
        layer = f"model.layers.{idx}."
        h = norm(x, layer + "input_layernorm.weight")
        q, k, v = (
            (h @ w[f"{layer}self_attn.{part}_proj.weight"].T).view(len(ids), -1, shape.head_dim)
            for part in "qkv"
        )
        q, k = rotate(q, shape), rotate(k, shape)
        outs = []
        for head in range(shape.num_heads):
            kv_head = head // (shape.num_heads // shape.num_kv_heads)
            scores = q[:, head] @ k[:, kv_head].T / math.sqrt(shape.head_dim)
            scores = scores.masked_fill(future, -math.inf).softmax(-1)
            outs.append(scores @ v[:, kv_head])
        x = x + torch.cat(outs, dim=-1) @ w[layer + "self_attn.o_proj.weight"].T
        h = norm(x, layer + "post_attention_layernorm.weight")
        gate = h @ w[layer + "mlp.gate_proj.weight"].T
        up = h @ w[layer + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + (-gate).exp()) * up) @ w[layer + "mlp.down_proj.weight"].T
    head_name = "model.embed_tokens.weight" if shape.is_head_tied else "lm_head.weight"
    return norm(x, "model.norm.weight") @ w[head_name].T


@pytest.mark.parametrize(
    "shape",
    [
        TinyShape(),
        TinyShape(is_head_tied=False, num_kv_heads=4),
        TinyShape(num_kv_heads=1, num_layers=3),
        TinyShape(hidden_size=48, num_heads=3, num_kv_heads=3, head_dim=32),
        TinyShape(rope={"rope_type": "linear", "factor": 4.0}),
        TinyShape(rope={"type": "linear", "rope_type": "linear", "factor": 2.0}),
        TinyShape(rope=LLAMA3, rope_theta=500.0),
    ],
)
def test_logits_equal_a_dense_implementation(tmp_path: Path, shape: TinyShape) -> None:
    """All logits of a prompt agree with a plain float64 Llama, whatever the shape and scaling."""
    weights = write_hf_folder(tmp_path, shape)
    ids = [(7 * i * i + 3) % len(TOKENS) for i in range(90)]
    runner = ModelRunner(tmp_path, num_blocks=8)
    logits = runner.forward([Row(ids, 0, [5, 0, 3, 1, 7, 2], len(ids))])
    expected = dense_logits(weights, shape, ids)
    assert expected.std() > 0.5
    torch.testing.assert_close(logits.double(), expected, atol=2e-4, rtol=1e-4)


def test_llama3_scaling_changes_the_result(tmp_path: Path) -> None:
    """The scaling of the test above is not one that does nothing."""
    ids = list(range(80))
    results: list[Any] = []
    for name, rope in (("plain", None), ("scaled", LLAMA3)):
        write_hf_folder(tmp_path / name, TinyShape(rope=rope, rope_theta=500.0))
        runner = ModelRunner(tmp_path / name, num_blocks=8)
        results.append(runner.forward([Row(ids, 0, list(range(5)), 1)]))
    assert (results[0] - results[1]).abs().max() > 0.05
