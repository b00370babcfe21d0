"""Decode steps through fixed memory: the same logits as step by step, and nothing else touched.

What is recorded here is played by computing it again; that CUDA graphs play the same is checked on
a GPU (`headrace_worker.gpu.check`).
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from headrace_testing.tiny_model import TOKENS, TinyShape, write_hf_folder
from headrace_worker.kernels.dispatch import kernels_for
from headrace_worker.kernels.plan import PlacedRow, make_plan
from headrace_worker.model.batch import Row, build_batch
from headrace_worker.model.decode_graphs import MAX_ROWS, DecodeGraphs, padded_size
from headrace_worker.model.decoder import Decoder
from headrace_worker.model.loader import load_model

NUM_BLOCKS, S, CONTEXT = 12, 4, 24


class Recomputing:
    """Keeps no program: computes once more into the same memory."""

    def __init__(self) -> None:
        self.num_recorded = self.num_played = 0

    def record(self, compute):
        self.num_recorded += 1
        result = compute()

        def play() -> None:
            self.num_played += 1
            result.copy_(compute())

        return play, result


class Unable:
    """Records nothing."""

    def __init__(self) -> None:
        self.num_asked = 0

    def record(self, compute):
        self.num_asked += 1
        raise RuntimeError("out of memory")


def plan_of(slots, contexts, tables, max_context):
    """The torch backend's plan, made anew from what the memory holds now."""

    class Late:
        @property
        def slots(self):
            return slots

        @property
        def _plan(self):
            rows = [
                PlacedRow(idx, 1, int(context), tables[idx, : -(-int(context) // S)].long().numpy())
                for idx, context in enumerate(contexts)
            ]
            return make_plan(rows, slots, S)

        decode = property(lambda self: self._plan.decode)
        prefill = ()

    assert max_context == CONTEXT
    return Late()


@pytest.fixture
def parts(tmp_path: Path):
    write_hf_folder(tmp_path, TinyShape(num_layers=2, hidden_size=32, ffn_size=48))
    loaded = load_model(tmp_path)
    config = loaded.config
    decoder = Decoder(config, loaded.weights, kernels_for("torch"))
    shape = (config.num_layers, 2, NUM_BLOCKS + 1, S, config.num_kv_heads, config.head_dim)
    kv = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    return decoder, kv


def rows_of(number: int) -> list[Row]:
    """Rows at different places of their last block, each over its own blocks."""
    tables = [[3, 0, 7], [5], [1, 9], [11, 2], [8], [4]]
    starts = [9, 0, 7, 4, 3, 1]
    return [
        Row([(5 * idx + 2) % len(TOKENS)], starts[idx], tables[idx], 1) for idx in range(number)
    ]


@torch.inference_mode()
def test_logits_and_memory_are_those_of_steps_one_by_one(parts) -> None:
    """Sizes that are padded and not, one after the other over the same recordings."""
    decoder, kv = parts
    recorder = Recomputing()
    graphs = DecodeGraphs(decoder, plan_of, kv, CONTEXT, recorder)
    for number in (3, 1, 4, 6, 2, 3):
        rows = rows_of(number)
        twin = kv.clone()
        expected = decoder.forward(build_batch(rows, S), twin)
        result = graphs(rows)
        assert result is not None
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
        # The last block belongs to nobody.
        torch.testing.assert_close(kv[:, :, :-1], twin[:, :, :-1], atol=1e-5, rtol=1e-5)
    assert recorder.num_recorded == len({padded_size(number) for number in (3, 1, 4, 6, 2)})
    assert recorder.num_played == 6


def test_other_steps_are_left_alone(parts) -> None:
    """Prompts, tokens without logits, and batches above every size."""
    decoder, kv = parts
    recorder = Recomputing()
    graphs = DecodeGraphs(decoder, plan_of, kv, CONTEXT, recorder)
    assert graphs([*rows_of(2), Row([1, 2], 0, [10], 1)]) is None
    assert graphs([Row([1], 0, [10], 0)]) is None
    assert graphs(rows_of(1) * (MAX_ROWS + 1)) is None
    assert recorder.num_recorded == 0


def test_what_cannot_be_recorded_is_asked_for_once(parts, caplog) -> None:
    """A size without a recording is said once and left to steps one by one for ever after."""
    decoder, kv = parts
    recorder = Unable()
    graphs = DecodeGraphs(decoder, plan_of, kv, CONTEXT, recorder)
    with caplog.at_level(logging.WARNING):
        assert graphs(rows_of(3)) is None
        assert graphs(rows_of(4)) is None
    assert recorder.num_asked == 1
    assert [record.message for record in caplog.records] == [
        "decode steps of 4 rows cannot be recorded: out of memory"
    ]


def test_sizes_cover_every_batch_with_little_padding() -> None:
    """A batch fits its size, and less than half of it is padding."""
    for number in range(1, MAX_ROWS + 1):
        assert number <= padded_size(number) < 2 * number + 2
    assert padded_size(64) == 64
    assert padded_size(MAX_ROWS) == MAX_ROWS
