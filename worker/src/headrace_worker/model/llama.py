"""The Llama decoder (arXiv 2302.13971) over paged KV, written once against a set of kernels."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from headrace_worker.kernels.dispatch import Kernels
from headrace_worker.kernels.reference import AttentionPlan
from headrace_worker.model.batch import Batch
from headrace_worker.model.config import ModelConfig, RopeScaling
from headrace_worker.model.weights import LayerWeights, LlamaWeights


class Llama:
    """Computes logits of a ragged batch; holds weights and constants, no per-request state."""

    def __init__(self, config: ModelConfig, weights: LlamaWeights, kernels: Kernels) -> None:
        self._config = config
        self._weights = weights
        self._kernels = kernels
        self._inv_freq = rope_inverse_frequencies(config)

    def forward(self, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        """Compute one step.

        Args:
            batch: tokens and plan.
            kv: (layers, 2, N, S, K, D) the KV pool; the batch's slots are written.

        Returns:
            (len(batch.logit_idx), V) logits.
        """
        hidden = F.embedding(batch.token_ids, self._weights.embedding)
        angles = torch.outer(batch.positions.to(torch.float32), self._inv_freq)
        both = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        cos, sin = both.cos(), both.sin()
        for layer, layer_kv in zip(self._weights.layers, kv, strict=True):
            hidden = hidden + self._attention(layer, hidden, (cos, sin), layer_kv, batch.plan)
            hidden = hidden + self._ffn(layer, hidden)
        wanted = hidden.index_select(0, batch.logit_idx)
        wanted = self._norm(wanted, self._weights.final_norm)
        # The tall matrix on the left is about twice as fast as F.linear for a few rows (MKL).
        return torch.mm(self._weights.head, wanted.t()).t().contiguous()

    def _attention(
        self,
        layer: LayerWeights,
        hidden: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        kv: torch.Tensor,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        qkv = F.linear(self._norm(hidden, layer.attention_norm), layer.qkv)
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, self._config.head_dim)
        rotated = self._kernels.apply_rope(heads[:, : num_heads + num_kv_heads], *rope)
        q, k = rotated[:, :num_heads], rotated[:, num_heads:]
        self._kernels.write_kv(k, heads[:, num_heads + num_kv_heads :], kv, plan.slots)
        mixed = self._kernels.paged_attention(q, kv, plan)
        return F.linear(mixed.reshape(len(hidden), -1), layer.attention_out)

    def _ffn(self, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
        gate_up = F.linear(self._norm(hidden, layer.ffn_norm), layer.gate_up)
        return F.linear(self._kernels.silu_mul(gate_up), layer.down)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._kernels.rms_norm(x, weight, self._config.rms_eps)


def rope_inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Return the (D/2,) angle per position of each rotary pair, scaling applied."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inv_freq = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    if scaling.kind == "factors":
        return inv_freq / torch.tensor(scaling.factors)
    if scaling.kind == "llama3":
        return _llama3_frequencies(inv_freq, scaling)
    return inv_freq


def _llama3_frequencies(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow the long waves down by *factor*, leave the short ones, blend between."""
    turns = scaling.original_context_tokens * inv_freq / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share_kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return inv_freq * (share_kept + (1.0 - share_kept) / scaling.factor)
