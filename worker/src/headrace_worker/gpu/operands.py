"""Random inputs of kernels and whole random models, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace_worker.kernels.plan import PlacedRow
from headrace_worker.model.config import ModelConfig
from headrace_worker.model.info import ModelInfo
from headrace_worker.model.weights import (
    DecoderWeights,
    LoadedModel,
    Placement,
    assemble,
    num_columns,
)

_VECTORS = ("attention_norm", "ffn_norm", "attention_post_norm", "ffn_post_norm", "final_norm")


@dataclass(frozen=True)
class Heads:
    """Heads of an attention."""

    num_heads: int
    num_kv_heads: int
    dim: int


@dataclass(frozen=True)
class AttentionInput:
    """A ragged batch over a shuffled pool.

    Attributes:
        q: (T, H, D).
        kv: (2, N, S, K, D).
        rows: who sees what.
        slots: (T,) slot of each token.
    """

    q: torch.Tensor
    kv: torch.Tensor
    rows: list[PlacedRow]
    slots: torch.Tensor


class Random:
    """Draws tensors of one type on one device; the same ones for the same seed and device."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Draw standard normal values."""
        return torch.randn(
            *size, generator=self._generator, device=self.device, dtype=dtype or self.dtype
        )

    def attention(
        self, heads: Heads, shapes: Sequence[tuple[int, int]], block_size: int
    ) -> AttentionInput:
        """Lay rows of (tokens before, new tokens) over shuffled blocks."""
        needed = [-(-(before + new) // block_size) for before, new in shapes]
        order = np.random.default_rng(0).permutation(sum(needed))
        rows, slots, start = [], [], 0
        for (before, new), number in zip(shapes, needed, strict=True):
            table, order = order[:number], order[number:]
            rows.append(PlacedRow(start, new, before + new, table))
            position = np.arange(before, before + new)
            slots.append(table[position // block_size] * block_size + position % block_size)
            start += new
        return AttentionInput(
            q=self.normal(start, heads.num_heads, heads.dim),
            kv=self.normal(2, sum(needed), block_size, heads.num_kv_heads, heads.dim),
            rows=rows,
            slots=torch.from_numpy(np.concatenate(slots)).to(self.device),
        )


def random_model(config: ModelConfig, placement: Placement, seed: int = 0) -> LoadedModel:
    """Return a model of random weights that lie where they are wanted from the start.

    Activations keep about the same size from layer to layer.
    """
    draw = Random(torch.device(placement.device), placement.dtype, seed)
    heads = config.num_heads + 2 * config.num_kv_heads
    rows = {
        "embedding": config.vocab_size,
        "head": config.vocab_size,
        "qkv": heads * config.head_dim,
        "qkv_bias": heads * config.head_dim,
        "attention_out": config.hidden_size,
        "gate_up": 2 * config.ffn_size,
        "down": config.hidden_size,
        "q_norm": config.head_dim,
        "k_norm": config.head_dim,
        **dict.fromkeys(_VECTORS, config.hidden_size),
    }

    def fused(name: str) -> torch.Tensor:
        part = name.rpartition(".")[2]
        if part.endswith("norm"):
            return draw.normal(rows[part]).mul_(0.1).add_(1.0)
        if part == "qkv_bias":
            return draw.normal(rows[part]).mul_(0.1)
        columns = config.hidden_size
        if part not in ("embedding", "head"):
            columns = num_columns(config, name)
        return draw.normal(rows[part], columns).mul_(columns**-0.5)

    weights: DecoderWeights = assemble(config, fused)
    return LoadedModel(config, weights, random_info(config))


def random_info(config: ModelConfig) -> ModelInfo:
    """Describe a random model, which has no tokenizer."""
    return ModelInfo(
        fingerprint="random",
        context_tokens=config.context_tokens,
        vocab_size=config.vocab_size,
        chat_template="",
        eos_token_ids=config.eos_token_ids,
        bos_token_id=None,
        add_bos=False,
        tokenizer_json=b"",
        special_tokens={},
        kv_bytes_per_token=config.kv_bytes_per_token,
        created_unix_s=0,
    )
