"""The decoder over paged KV, written once against a set of kernels.

Llama (arXiv 2302.13971) is its plain form; what other families add is switched by `ModelConfig`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from headrace_worker.kernels.dispatch import Kernels
from headrace_worker.kernels.plan import Scoring
from headrace_worker.model.batch import Batch, Plan
from headrace_worker.model.config import GELU_TANH, ModelConfig
from headrace_worker.model.rope import RopeTable
from headrace_worker.model.weights import DecoderWeights, LayerWeights


@dataclass(frozen=True)
class _Step:
    """What all layers of a step share."""

    plan: Plan
    rope: tuple[torch.Tensor, torch.Tensor]
    local_rope: tuple[torch.Tensor, torch.Tensor]


class Decoder:
    """Computes logits of a ragged batch; holds weights and constants, no per-request state."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, kernels: Kernels) -> None:
        self._config = config
        self._weights = weights
        self._kernels = kernels
        self._rope = RopeTable.of(config)
        self._local_rope = RopeTable.of_windowed_layers(config) if config.window_tokens else None
        self._gate = kernels.gelu_mul if config.activation == GELU_TANH else kernels.silu_mul
        self._scoring = [scoring_of(config, idx) for idx in range(config.num_layers)]

    def forward(self, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        """Compute one step.

        Args:
            batch: tokens and plan.
            kv: (layers, 2, N, S, K, D) the KV pool; the batch's slots are written.

        Returns:
            (len(batch.logit_idx), V) logits.
        """
        return self.logits(self.hidden(batch, kv, batch.logit_idx))

    def hidden(self, batch: Batch, kv: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Compute one step up to the last norm; (len(wanted), E) of the tokens *wanted*."""
        hidden = F.embedding(batch.token_ids, self._weights.embedding)
        if self._config.embedding_scale != 1.0:
            hidden = hidden * self._config.embedding_scale
        rope = self._rope(batch.positions)
        local = self._local_rope(batch.positions) if self._local_rope else rope
        step = _Step(batch.plan, rope, local)
        layers = self._weights.layers
        normed = self._norm(hidden, layers[0].attention_norm)
        for idx, (layer, layer_kv) in enumerate(zip(layers, kv, strict=True)):
            mixed = self._attention(layer, self._scoring[idx], normed, layer_kv, step)
            hidden, normed = self._add_norm(hidden, mixed, layer.ffn_norm)
            changed = self._ffn(layer, normed)
            if idx + 1 < len(layers):
                hidden, normed = self._add_norm(hidden, changed, layers[idx + 1].attention_norm)
        last = hidden.index_select(0, wanted) + changed.index_select(0, wanted)
        return self._norm(last, self._weights.final_norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return (T, V) of what `hidden` returned."""
        if hidden.is_cuda:
            logits = F.linear(hidden, self._weights.head)
        else:
            # The tall matrix on the left is about twice as fast for a few rows (MKL).
            logits = torch.mm(self._weights.head, hidden.t()).t().contiguous()
        cap = self._config.logit_soft_cap
        return torch.tanh(logits / cap) * cap if cap else logits

    def _attention(
        self,
        layer: LayerWeights,
        scoring: Scoring,
        normed: torch.Tensor,
        kv: torch.Tensor,
        step: _Step,
    ) -> torch.Tensor:
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias)
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, self._config.head_dim)
        q = heads[:, :num_heads]
        k, v = heads[:, num_heads:].tensor_split(2, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        rope = step.local_rope if scoring.window_tokens else step.rope
        q = self._kernels.rope_write_kv(q, k, v, rope, kv, step.plan.slots)
        mixed = self._kernels.paged_attention(q, kv, step.plan, scoring)
        out = F.linear(mixed.reshape(len(normed), -1), layer.attention_out)
        return self._post_norm(out, layer.attention_post_norm)

    def _ffn(self, layer: LayerWeights, normed: torch.Tensor) -> torch.Tensor:
        gate_up = F.linear(normed, layer.gate_up)
        return self._post_norm(F.linear(self._gate(gate_up), layer.down), layer.ffn_post_norm)

    def _post_norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else self._norm(x, weight)

    def _add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kernels.add_rms_norm(hidden, delta, weight, self._config.rms_eps)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._kernels.rms_norm(x, weight, self._config.rms_eps)


def scoring_of(config: ModelConfig, layer_idx: int) -> Scoring:
    """How a layer turns products of queries and keys into weights."""
    return Scoring(config.score_scale, config.attention_soft_cap, config.window_of(layer_idx))
