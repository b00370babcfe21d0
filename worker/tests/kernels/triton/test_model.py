"""A whole model on the Triton kernels, in the interpreter, against the plain-torch ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headrace_testing.tiny_model import TOKENS, TinyShape, write_hf_folder
from headrace_worker.model.decode_graphs import DecodeGraphs
from headrace_worker.model.runner import ModelRunner, Row


def windowed(folder: Path) -> None:
    """Turn the tiny Llama into a Mistral with a window."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"model_type": "mistral", "sliding_window": 11}
    path.write_text(json.dumps(values))


@pytest.mark.parametrize("is_windowed", [False, True])
def test_steps_equal_those_of_the_torch_backend(tmp_path: Path, *, is_windowed: bool) -> None:
    """A prompt, then a chunk beside a decode, then a copied block."""
    write_hf_folder(tmp_path, TinyShape(num_layers=1, hidden_size=32, ffn_size=48))
    if is_windowed:
        windowed(tmp_path)
    runners = [ModelRunner(tmp_path, num_blocks=8, backend=name) for name in ("torch", "triton")]
    ids = [(7 * i * i + 3) % len(TOKENS) for i in range(40)]
    steps = [
        [Row(ids[:20], 0, [5, 2], 1)],
        [Row(ids[20:21], 20, [5, 2], 1), Row(ids[:30], 0, [1, 7], 30)],
    ]
    for rows in steps:
        expected, result = (runner.forward(rows) for runner in runners)
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)
    for runner in runners:
        runner.copy_block(2, 4)
    expected, result = (runner.forward([Row([9], 21, [5, 4], 1)]) for runner in runners)
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


class Recomputing:
    """Plays a computation by computing it again."""

    def record(self, compute):
        result = compute()
        return lambda: result.copy_(compute()), result


def test_a_padded_decode_over_fixed_memory_equals_the_torch_backend(tmp_path: Path) -> None:
    """Three rows in a recording of four, twice, as the Triton plan takes it."""
    write_hf_folder(tmp_path, TinyShape(num_layers=1, hidden_size=32, ffn_size=48))
    windowed(tmp_path)
    torch_runner = ModelRunner(tmp_path, num_blocks=9, backend="torch")
    runner = ModelRunner(tmp_path, num_blocks=9, backend="triton")
    graphs = DecodeGraphs(runner._model, runner._kernels.decode_plan, runner._kv, 48, Recomputing())
    ids = [(7 * i * i + 3) % len(TOKENS) for i in range(40)]
    for each in (torch_runner, runner):
        each.forward([Row(ids[:20], 0, [5, 2], 1)])
        each.forward([Row(ids[:3], 0, [1], 1)])
    for step in range(2):
        rows = [
            Row([ids[step]], 20 + step, [5, 2], 1),
            Row([ids[step + 9]], 3 + step, [1], 1),
            Row([7], step, [4], 1),
        ]
        expected = torch_runner.forward(rows)
        with torch.inference_mode():
            result = graphs(rows)
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)
