"""Weights in memory, and how they are put together from a checkpoint's tensors.

The layers use fused matrices (query, key and value in one; both halves of the SwiGLU in one).
`tensor_plan` says which checkpoint tensors, by their Hugging Face names, make up each of them: the
Hugging Face loader concatenates by it, a GGUF is converted by it, a prepared folder has its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from headrace_worker.kernels.blocks import BlockMatrix
from headrace_worker.model.config import ModelConfig
from headrace_worker.model.info import ModelInfo

_LAYER_PARTS: dict[str, tuple[str, ...]] = {
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention_out": ("self_attn.o_proj",),
    "ffn_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; matrices are (out, in).

    Attributes:
        attention_norm: scale of the norm before the attention.
        qkv: query, key and value heads, one below the other, ((H + 2K) * D, hidden size).
        attention_out: (hidden size, H * D).
        ffn_norm: scale of the norm before the SwiGLU.
        gate_up: both halves of the SwiGLU, (2 * ffn size, hidden size).
        down: (hidden size, ffn size).
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    attention_out: torch.Tensor
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class LlamaWeights:
    """All weights, float32. With a tied head, *head* is *embedding*."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        blocks: quantised forms of matrices by their keys of `tensor_plan`: the same weights in less
            memory. Any may be missing.
    """

    config: ModelConfig
    weights: LlamaWeights
    info: ModelInfo
    blocks: Mapping[str, BlockMatrix] = field(default_factory=dict)


def tensor_plan(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Map each fused tensor's name to the checkpoint tensors it stacks along dimension 0."""
    plan: dict[str, tuple[str, ...]] = {"embedding": ("model.embed_tokens.weight",)}
    for layer_idx in range(config.num_layers):
        for name, parts in _LAYER_PARTS.items():
            plan[f"layers.{layer_idx}.{name}"] = tuple(
                f"model.layers.{layer_idx}.{part}.weight" for part in parts
            )
    plan["final_norm"] = ("model.norm.weight",)
    if not config.is_head_tied:
        plan["head"] = ("lm_head.weight",)
    return plan


def num_columns(config: ModelConfig, name: str) -> int:
    """Return the columns of a matrix, by its key of `tensor_plan`."""
    part = name.rpartition(".")[2]
    if part == "attention_out":
        return config.num_heads * config.head_dim
    return config.ffn_size if part == "down" else config.hidden_size


def assemble(config: ModelConfig, fused: Callable[[str], torch.Tensor]) -> LlamaWeights:
    """Build the weights; *fused* returns the float32 tensor of a key of `tensor_plan`."""
    layers = tuple(
        LayerWeights(**{name: fused(f"layers.{idx}.{name}") for name in _LAYER_PARTS})
        for idx in range(config.num_layers)
    )
    embedding = fused("embedding")
    head = embedding if config.is_head_tied else fused("head")
    return LlamaWeights(embedding, layers, fused("final_norm"), head)
