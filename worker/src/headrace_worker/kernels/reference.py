"""Plain-torch twins of every kernel: what each operation means, and the oracle of its tests.

Shapes use the letters of the glossary: T tokens in the batch, H query heads, K KV heads, D head
size, N blocks, S block size. All of it is float32 on the CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from headrace_worker.kernels.blocks import (
    GROUP,
    KIND_F32,
    KIND_Q4,
    KIND_Q8,
    KIND_Q8_HALVES,
    BlockMatrix,
)
from headrace_worker.kernels.plan import AttentionPlan, DecodeGroup, PrefillRow, Scoring
from headrace_worker.kernels.rounding import Rounding

# MKL's vector functions (tanh, cos, exp and others) set themselves up in the first call to any of
# them. If several of torch's threads make it together, one may still compute at another accuracy,
# 3e-5 beside (seen in one process of 1,000). One element is computed by one thread.
torch.tanh(torch.zeros(1))


def dequantised(weight: BlockMatrix) -> torch.Tensor:
    """Return a block matrix as float32 (out, in)."""
    groups = weight.data.view(weight.num_out, weight.num_in // GROUP, -1)
    if weight.kind == KIND_F32:
        return weight.data.view(torch.float32)
    if weight.kind == KIND_Q8_HALVES:
        scales = groups[..., :8].contiguous().view(torch.float32)
        values = groups[..., 8:].contiguous().view(torch.int8).float()
        values = values * scales.repeat_interleave(GROUP // 2, dim=-1)
        return values.reshape(weight.num_out, weight.num_in)
    scale = groups[..., :4].contiguous().view(torch.float32)
    if weight.kind == KIND_Q8:
        values = groups[..., 4:].contiguous().view(torch.int8).float() * scale
    else:
        offset = groups[..., 4:8].contiguous().view(torch.float32)
        nibbles = torch.cat((groups[..., 8:] & 15, groups[..., 8:] >> 4), dim=-1)
        values = nibbles.float() * scale + offset
    return values.reshape(weight.num_out, weight.num_in)


def linear(x: torch.Tensor, weight: BlockMatrix) -> torch.Tensor:
    """Return x W^T; x: (T, in)."""
    return F.linear(x, dequantised(weight))


def rounded(x: torch.Tensor, largest: int) -> torch.Tensor:
    """Return x with each group of 32 rounded to *largest* steps of its largest value."""
    groups = x.view(len(x), -1, GROUP)
    top = groups.abs().amax(dim=-1, keepdim=True)
    factor = torch.where(top > 0, largest / top, 0.0)
    return ((groups * factor).round() * (top / largest)).view(x.shape)


def rounded_linear(x: torch.Tensor, weight: BlockMatrix, rounding: Rounding) -> torch.Tensor:
    """Return x W^T of rounded rows; see `Rounding` for which type meets which weights."""
    if rounding == Rounding.FLOAT32 or weight.kind == KIND_F32:
        return linear(x, weight)
    is_int8 = rounding == Rounding.INT8 and weight.kind == KIND_Q4
    return linear(rounded(x, 127 if is_int8 else 32767), weight)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide each row by its root mean square and scale (arXiv 1910.07467). x: (T, E)."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of (T, 2F) holding both side by side; (T, F)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up, GELU by tanh (arXiv 1606.08415); as `silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + delta and its norm; (T, E) each."""
    total = x + delta
    return total, rms_norm(total, weight, eps)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + D/2) of every head (arXiv 2104.09864, half-split layout).

    Args:
        x: (T, heads, D).
        cos: (T, D/2).
        sin: (T, D/2).
    """
    first, second = x.chunk(2, dim=-1)
    cos, sin = (part.unsqueeze(1).to(x.dtype) for part in (cos, sin))
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rope_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    kv: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Rotate queries and keys, put keys and values into their slots, and return the queries.

    Args:
        q: (T, H, D).
        k: (T, K, D).
        v: (T, K, D).
        rope: cosines and sines, (T, D/2) each.
        kv: (2, N, S, K, D), one layer's pool.
        slots: (T,) slot of each token.
    """
    write_kv(apply_rope(k, *rope), v, kv, slots)
    return apply_rope(q, *rope)


def write_kv(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    """Put keys and values (T, K, D) into their slots of one layer's pool kv: (2, N, S, K, D)."""
    flat = kv.view(2, -1, *kv.shape[3:])
    flat[0].index_copy_(0, slots, k)
    flat[1].index_copy_(0, slots, v)


def copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy whole blocks between pools (layers, 2, N, S, K, D), which may be one and the same.

    Args:
        source: read.
        target: written.
        pairs: (P, 2) block ids (from, to); no id is both written and read, none written twice.
    """
    target[:, :, pairs[:, 1].long()] = source[:, :, pairs[:, 0].long()]


def paged_attention(
    q: torch.Tensor, kv: torch.Tensor, plan: AttentionPlan, scoring: Scoring
) -> torch.Tensor:
    """Causal grouped-query attention of a ragged batch over paged KV.

    The batch's own keys and values must have been written before. A masked slot may hold anything
    finite.

    Args:
        q: (T, H, D), rotated.
        kv: (2, N, S, K, D), one layer's pool.
        plan: rows and blocks.
        scoring: scale, cap and window.

    Returns:
        (T, H, D).
    """
    out = torch.empty_like(q)
    for group in plan.decode:
        out[group.token_idx] = _attend_decode(q[group.token_idx], kv, group, scoring)
    for row in plan.prefill:
        out[row.start : row.end] = _attend_prefill(q[row.start : row.end], kv, row, scoring)
    return out


def _attend_decode(
    q: torch.Tensor, kv: torch.Tensor, group: DecodeGroup, scoring: Scoring
) -> torch.Tensor:
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[3]
    k, v = (_gather(pool, group.block_ids, num_rows) for pool in kv)
    bias = group.bias
    if scoring.window_tokens:
        first = (group.contexts - scoring.window_tokens)[:, None, None, None]
        bias = bias.masked_fill(torch.arange(k.shape[2]) < first, float("-inf"))
    # The query heads that share a KV head become the "queries" of that head: no copy of K and V.
    grouped = q.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return _attend(grouped, k, v, bias, scoring).reshape(num_rows, num_heads, head_dim)


def _attend_prefill(
    q: torch.Tensor, kv: torch.Tensor, row: PrefillRow, scoring: Scoring
) -> torch.Tensor:
    k, v = (_gather(pool, row.block_ids, 1)[:, :, : row.context_tokens] for pool in kv)
    bias = row.bias
    is_windowed = 0 < scoring.window_tokens < row.context_tokens
    if is_windowed or (bias is None and scoring.soft_cap):
        bias = _causal_bias(len(q), row.context_tokens, scoring.window_tokens)
    queries = q.transpose(0, 1).unsqueeze(0)
    return _attend(queries, k, v, bias, scoring).squeeze(0).transpose(0, 1)


def _causal_bias(num_new: int, context_tokens: int, window_tokens: int) -> torch.Tensor:
    """Return (new, context): 0 where the last *num_new* positions see one, -inf where not."""
    position = torch.arange(context_tokens - num_new, context_tokens).unsqueeze(1)
    seen = torch.arange(context_tokens)
    is_hidden = seen > position
    if window_tokens:
        is_hidden |= seen <= position - window_tokens
    return torch.zeros(is_hidden.shape).masked_fill_(is_hidden, float("-inf"))


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    """Attend (B, H, T, D) queries to (B, K, C, D) keys and values; causal without a bias."""
    if not scoring.soft_cap:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=bias,
            is_causal=bias is None,
            scale=scoring.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    num_shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(num_shared, dim=1) for x in (k, v))
    scores = torch.tanh(q @ k.transpose(-1, -2) * (scoring.scale / scoring.soft_cap))
    weights = scores * scoring.soft_cap
    return torch.softmax(weights if bias is None else weights + bias, dim=-1) @ v


def _gather(pool: torch.Tensor, block_ids: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Collect blocks of (N, S, K, D) as (rows, K, tokens, D), a view of one contiguous copy."""
    num_kv_heads, head_dim = pool.shape[2:]
    blocks = pool.index_select(0, block_ids)
    return blocks.view(num_rows, -1, num_kv_heads, head_dim).transpose(1, 2)
