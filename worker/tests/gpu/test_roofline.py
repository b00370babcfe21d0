"""Floors of work, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace_worker.gpu import roofline
from headrace_worker.gpu.model_bench import LARGE
from headrace_worker.gpu.roofline import Roofline, Work

LIMITS = Roofline(copy_bytes_per_s=4e12, matrix_flop_per_s=800e12)


def test_the_slower_limit_is_the_floor() -> None:
    """Bytes or products, whatever takes longer; the share is of that."""
    assert LIMITS.floor_s(Work(4e12, 0)) == 1.0
    assert LIMITS.floor_s(Work(4e12, 1600e12)) == 2.0
    assert LIMITS.ratio(Work(2e12, 0), 1.0) == 0.5


def test_decode_attention_reads_every_key_and_value_once() -> None:
    """64 rows of 4,096 positions, 8 KV heads of 128: 1.07 GB, and queries and results."""
    work = roofline.decode_attention([4096] * 64, 32, 8, 128)
    assert work.num_bytes == 2 * (2 * 8 * 128 * 4096 * 64 + 2 * 32 * 128 * 64)
    assert LIMITS.floor_s(work) == pytest.approx(269e-6, rel=0.01)


def test_prefill_attention_counts_the_pairs_that_see_each_other() -> None:
    """A token of four sees itself and those before; after a context all of it."""
    assert roofline.prefill_attention(4, 4, 1, 1, 1).num_flop == 4 * 10
    assert roofline.prefill_attention(2, 5, 3, 1, 8).num_flop == 4 * 3 * 8 * 9
    whole = roofline.prefill_attention(8192, 8192, 32, 8, 128)
    assert whole.num_flop == pytest.approx(0.55e12, rel=0.01)


def test_a_chunked_prompt_is_the_whole_prompt() -> None:
    """Chunks' pairs add up to those of the whole."""
    parts = [roofline.prefill_attention(64, end, 4, 2, 16) for end in range(64, 513, 64)]
    whole = roofline.prefill_attention(512, 512, 4, 2, 16)
    assert sum(part.num_flop for part in parts) == whole.num_flop


def test_small_kernels_move_what_they_read_and_write() -> None:
    """The sizes named in the docstrings, by hand."""
    assert roofline.add_rms_norm(8192, 4096).num_bytes == 8 * 8192 * 4096
    assert roofline.gate(8192, 14_336).num_bytes == 6 * 8192 * 14_336
    assert roofline.copy(1000).num_bytes == 2000
    assert roofline.one_pass(64, 128_256).num_bytes == 4 * 64 * 128_256
    heads = 4 * 8192 * 48 * 128
    assert roofline.rope_write_kv(8192, 32, 8, 128).num_bytes == heads + 4 * 8192 * 128


def test_a_decode_step_of_eight_billion_weights() -> None:
    """Without the embedding 7.5 billion weights are read once, whatever the batch."""
    one, many = (roofline.decode_step(LARGE, [0] * number) for number in (1, 64))
    assert one.num_bytes == pytest.approx(2 * 7.505e9, rel=0.001)
    queries = 2 * 2 * 32 * 128 * 32
    assert many.num_bytes - one.num_bytes == 63 * queries
    assert many.num_flop == 64 * one.num_flop
    tied = roofline.decode_step(replace(LARGE, is_head_tied=True), [0])
    assert tied.num_bytes == one.num_bytes
