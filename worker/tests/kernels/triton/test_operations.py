"""Each Triton kernel in the interpreter against its twin, over odd sizes and both types.

bfloat16 is left out: the interpreter multiplies its bit patterns in `tl.dot` (triton issue 11584).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from headrace_worker.kernels import plan, reference
from headrace_worker.kernels.plan import PlacedRow, Scoring
from headrace_worker.kernels.triton import backend
from headrace_worker.kernels.triton.paged_decode import num_splits

# The logistic function's exponential overflows to infinity on the way to zero, as it should.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

TYPES = (torch.float32, torch.float16)
S = 4


def randn(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with what float32 gives; half precision may round its last bits otherwise."""
    is_half = result.dtype == torch.float16
    tolerance = {"atol": 4e-3, "rtol": 4e-3} if is_half else {"atol": 2e-5, "rtol": 2e-5}
    torch.testing.assert_close(result.float(), expected.float(), **tolerance)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [8, 96, 576])
def test_rms_norm(dtype: torch.dtype, size: int) -> None:
    """Rows of any length, a row of zeros among them, alone and with an addition before."""
    x, delta = randn(1, 5, size).to(dtype), randn(2, 5, size).to(dtype)
    x[3], delta[3] = 0.0, 0.0
    weight = (1 + randn(3, size)).to(dtype)
    expected = reference.rms_norm(x.float(), weight.float(), 1e-5)
    close(backend.rms_norm(x, weight, 1e-5), expected)
    total, normed = backend.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    close(normed, reference.rms_norm((x + delta).float(), weight.float(), 1e-5))


def test_rms_norm_of_heads_inside_wider_rows() -> None:
    """Heads are normed where they lie, without a copy before."""
    heads = randn(4, 3, 7, 16)
    weight = 1 + randn(5, 16)
    result = backend.rms_norm(heads[:, 2:5], weight, 1e-6)
    close(result, reference.rms_norm(heads[:, 2:5], weight, 1e-6))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [1, 96, 1500])
def test_gates(dtype: torch.dtype, size: int) -> None:
    """SiLU and GELU, over rows longer and shorter than a program's."""
    gate_up = (3 * randn(6, 3, 2 * size)).to(dtype)
    close(backend.silu_mul(gate_up), reference.silu_mul(gate_up.float()))
    close(backend.gelu_mul(gate_up), reference.gelu_mul(gate_up.float()))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), [(4, 2, 16), (3, 3, 40), (5, 1, 2)])
def test_rope_write_kv(dtype: torch.dtype, num_heads: int, num_kv_heads: int, dim: int) -> None:
    """Queries come back turned, keys turned and values as they are land in their slots only."""
    heads = randn(7, 3, num_heads + 2 * num_kv_heads, dim).to(dtype)
    q, k, v = torch.split(heads, (num_heads, num_kv_heads, num_kv_heads), dim=1)
    angles = randn(8, 3, dim // 2)
    rope = angles.cos(), angles.sin()
    slots = torch.tensor([5, 19, 0])
    kv = torch.full((2, 6, S, num_kv_heads, dim), 7.0, dtype=dtype)
    expected_kv = kv.float()
    expected = reference.rope_write_kv(q.float(), k.float(), v.float(), rope, expected_kv, slots)
    close(backend.rope_write_kv(q, k, v, rope, kv, slots), expected)
    close(kv, expected_kv)
    assert int((kv == 7.0).sum()) == kv.numel() - 2 * 3 * num_kv_heads * dim


def test_copy_blocks() -> None:
    """Every plane of the named blocks, and no other, also between pools of different size."""
    source, target = randn(9, 2, 2, 6, S, 2, 8), randn(10, 2, 2, 9, S, 2, 8)
    pairs = torch.tensor([[3, 8], [0, 1]], dtype=torch.int32)
    expected = target.clone()
    reference.copy_blocks(source, expected, pairs)
    backend.copy_blocks(source, target, pairs)
    assert torch.equal(target, expected)


def placed(
    shapes: Sequence[tuple[int, int]], num_blocks: int
) -> tuple[list[PlacedRow], torch.Tensor]:
    """Lay rows of (tokens before, new tokens) over shuffled blocks; also return their slots."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
    rows, slots, start = [], [], 0
    for before, new in shapes:
        context = before + new
        table = np.asarray([order.pop() for _ in range(-(-context // S))])
        rows.append(PlacedRow(start, new, context, table))
        pos = np.arange(before, context)
        slots.append(table[pos // S] * S + pos % S)
        start += new
    return rows, torch.from_numpy(np.concatenate(slots))


SCORINGS = [Scoring(0.3), Scoring(0.4, 3.0), Scoring(0.3, 0.0, 5), Scoring(0.3, 6.0, 70)]


@pytest.mark.parametrize("scoring", SCORINGS, ids=["plain", "cap", "window", "cap and window"])
@pytest.mark.parametrize(
    ("dtype", "num_heads", "num_kv_heads", "dim"),
    [(torch.float32, 3, 1, 40), (torch.float16, 4, 2, 16)],
)
def test_paged_attention(
    scoring: Scoring, dtype: torch.dtype, num_heads: int, num_kv_heads: int, dim: int
) -> None:
    """Decodes and chunks in one batch: new rows, continued ones, longer than a tile."""
    shapes = [(0, 1), (0, 5), (90, 1), (13, 70)]
    rows, slots = placed(shapes, num_blocks=80)
    kv = randn(11, 2, 80, S, num_kv_heads, dim).to(dtype)
    q = randn(12, len(slots), num_heads, dim).to(dtype)
    result = backend.paged_attention(q, kv, backend.make_plan(rows, slots, S), scoring)
    twin = plan.make_plan(rows, slots, S)
    close(result, reference.paged_attention(q.float(), kv.float(), twin, scoring))


def test_long_contexts_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a split context join to the same result, an empty part among them."""
    monkeypatch.setattr("headrace_worker.kernels.triton.paged_decode.num_splits", lambda *_: 4)
    rows, slots = placed([(299, 1), (63, 1), (128, 1)], num_blocks=130)
    kv, q = randn(13, 2, 130, S, 1, 16), randn(14, 3, 2, 16)
    scoring = Scoring(0.25, 0.0, 150)
    result = backend.paged_attention(q, kv, backend.make_plan(rows, slots, S), scoring)
    close(result, reference.paged_attention(q, kv, plan.make_plan(rows, slots, S), scoring))


def test_short_contexts_are_not_split() -> None:
    """A part is worth its join only from some length on."""
    assert num_splits(1, 255, torch.device("cpu")) == 1
    assert num_splits(1, 4096, torch.device("cpu")) == 4
