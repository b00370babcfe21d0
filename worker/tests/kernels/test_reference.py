"""The plain-torch operations against their definitions in float64."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from headrace_worker.kernels.plan import Scoring
from headrace_worker.kernels.reference import (
    apply_rope,
    gelu_mul,
    paged_attention,
    rms_norm,
    silu_mul,
    write_kv,
)
from headrace_worker.model.batch import Row, build_batch

N, S = 24, 4


def randn(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


FIRST_CALLS = """
import torch
sizes, tanh = [], torch.tanh
torch.tanh = lambda x: (sizes.append(x.numel()), tanh(x))[1]
import headrace_worker.kernels.dispatch
print(sizes)
"""


def test_the_first_vector_function_is_called_by_one_thread() -> None:
    """Of several that call together one may compute with another accuracy, in this call only."""
    command = [sys.executable, "-c", FIRST_CALLS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[1]\n", "")


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    """Rows are normalised on their own, eps inside the root."""
    x, weight = randn(1, 5, 48), randn(2, 48)
    x[3] = 0.0
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(rms_norm(x, weight, 1e-3).double(), expected * weight.double())


def test_gates_multiply_the_second_half() -> None:
    """The first half goes through SiLU or GELU, the second multiplies; the input stays."""
    x = randn(3, 4, 20)
    kept = x.clone()
    gate, up = x.double()[:, :10], x.double()[:, 10:]
    torch.testing.assert_close(silu_mul(x).double(), gate / (1 + (-gate).exp()) * up)
    erf_free = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    torch.testing.assert_close(gelu_mul(x).double(), erf_free * up)
    assert torch.equal(x, kept)


def test_rope_turns_pairs_and_keeps_their_length() -> None:
    """The pair (i, i + D/2) is a complex number times exp(i * angle)."""
    x, angles = randn(4, 6, 3, 8), randn(5, 6, 4)
    turned = apply_rope(x, angles.cos(), angles.sin())
    number = torch.complex(x[..., :4], x[..., 4:]) * torch.exp(1j * angles).unsqueeze(1)
    torch.testing.assert_close(turned, torch.cat((number.real, number.imag), dim=-1))


def test_write_kv_touches_only_its_slots() -> None:
    """Each token lands in block slot // S at offset slot % S; the rest stays."""
    kv = torch.full((2, N, S, 2, 8), 7.0)
    k, v = randn(6, 3, 2, 8), randn(7, 3, 2, 8)
    write_kv(k, v, kv, torch.tensor([5, 90, 0]))
    for token_idx, (block, offset) in enumerate([(1, 1), (22, 2), (0, 0)]):
        assert torch.equal(kv[0, block, offset], k[token_idx])
        assert torch.equal(kv[1, block, offset], v[token_idx])
    assert int((kv == 7.0).sum()) == kv.numel() - 2 * 3 * 2 * 8


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend the last len(q) positions of (T, K, D) keys causally, head by head."""
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    out = torch.empty_like(q)
    first = len(k) - len(q)
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        for i in range(len(q)):
            seen = first + i + 1
            scores = k[:seen, kv_head] @ q[i, head] / math.sqrt(q.shape[2])
            out[i, head] = scores.softmax(-1) @ v[:seen, kv_head]
    return out


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (9, 3), (2, 2), (8, 1)])
def test_paged_attention_of_a_ragged_batch(num_heads: int, num_kv_heads: int) -> None:
    """Decodes over 1 to 9 blocks, whole prompts and later chunks, in shuffled blocks."""
    # (tokens there before, new tokens)
    shapes = [(0, 1), (3, 1), (4, 1), (33, 1), (0, 7), (5, 6), (9, 3), (1, 1)]
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0)).tolist()
    kv = torch.full((2, N, S, num_kv_heads, 16), 50.0)
    rows, keys, values = [], [], []
    for idx, (before, new) in enumerate(shapes):
        table = [order.pop() for _ in range(-(-(before + new) // S))]
        rows.append(Row([0] * new, before, table, 0))
        k, v = (randn(10 * idx + i, before + new, num_kv_heads, 16) for i in (1, 2))
        slots = torch.tensor([table[p // S] * S + p % S for p in range(before)])
        if before:
            write_kv(k[:before], v[:before], kv, slots)
        keys.append(k)
        values.append(v)
    batch = build_batch(rows, S)
    news = [slice(before, None) for before, _ in shapes]
    new_k = torch.cat([k[new] for k, new in zip(keys, news, strict=True)])
    new_v = torch.cat([v[new] for v, new in zip(values, news, strict=True)])
    write_kv(new_k, new_v, kv, batch.plan.slots)
    q = randn(99, len(batch.token_ids), num_heads, 16)
    expected = [
        dense_attention(rows_q.double(), k.double(), v.double())
        for rows_q, k, v in zip(q.split([n for _, n in shapes]), keys, values, strict=True)
    ]
    result = paged_attention(q, kv, batch.plan, Scoring(0.25)).double()
    torch.testing.assert_close(result, torch.cat(expected), atol=1e-5, rtol=1e-5)
