"""Weights in memory, and how they are put together from a checkpoint's tensors.

The layers use fused matrices (query, key and value in one; gate and up in one).
`tensor_plan` says which checkpoint tensors, by their Hugging Face names, make up each of them: the
Hugging Face loader concatenates by it, a GGUF is converted by it, a prepared folder has its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from headrace_common.errors import InvalidRequest
from headrace_worker.kernels.blocks import BlockMatrix
from headrace_worker.model.config import ModelConfig
from headrace_worker.model.info import ModelInfo

_NORMS = {"attention_norm": ("input_layernorm.weight",)}
_MATRICES = {
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attention_out": ("self_attn.o_proj.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
}
_TWO_NORMS = {"ffn_norm": ("post_attention_layernorm.weight",)}
# The same Hugging Face name means the norm before the feed-forward part in one family and the one
# behind the attention in another.
_FOUR_NORMS = {
    "attention_post_norm": ("post_attention_layernorm.weight",),
    "ffn_norm": ("pre_feedforward_layernorm.weight",),
    "ffn_post_norm": ("post_feedforward_layernorm.weight",),
}
_QKV_BIAS = {
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
}
_QK_NORM = {"q_norm": ("self_attn.q_norm.weight",), "k_norm": ("self_attn.k_norm.weight",)}


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; matrices are (out, in).

    Attributes:
        attention_norm: scale of the norm before the attention.
        qkv: query, key and value heads, one below the other, ((H + 2K) * D, hidden size).
        attention_out: (hidden size, H * D).
        ffn_norm: scale of the norm before the feed-forward part.
        gate_up: gate and what it multiplies, (2 * ffn size, hidden size).
        down: (hidden size, ffn size).
        qkv_bias: ((H + 2K) * D,); None = the model has none. So with all that follow.
        q_norm: (D,) scale of the norm of each query head.
        k_norm: (D,) scale of the norm of each key head.
        attention_post_norm: scale of the norm behind the attention.
        ffn_post_norm: scale of the norm behind the feed-forward part.
    """

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    attention_out: torch.Tensor
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    attention_post_norm: torch.Tensor | None = None
    ffn_post_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class DecoderWeights:
    """All weights, float32. With a tied head, *head* is *embedding*."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: torch.Tensor


@dataclass(frozen=True)
class Placement:
    """Where weights and KV lie, and how they are computed.

    Attributes:
        device: as torch names it.
        dtype: of both.
        records_decodes: play recorded programs where a step only decodes; CUDA devices only.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    records_decodes: bool = True


ON_CPU = Placement()


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        blocks: quantised forms of matrices by their keys of `tensor_plan`: the same weights in less
            memory. Any may be missing.
    """

    config: ModelConfig
    weights: DecoderWeights
    info: ModelInfo
    blocks: Mapping[str, BlockMatrix] = field(default_factory=dict)


def tensor_plan(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Map each fused tensor's name to the checkpoint tensors it stacks along dimension 0."""
    plan: dict[str, tuple[str, ...]] = {"embedding": ("model.embed_tokens.weight",)}
    for layer_idx in range(config.num_layers):
        for name, parts in _layer_parts(config).items():
            plan[f"layers.{layer_idx}.{name}"] = tuple(
                f"model.layers.{layer_idx}.{part}" for part in parts
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


def assemble(config: ModelConfig, fused: Callable[[str], torch.Tensor]) -> DecoderWeights:
    """Build the weights; *fused* returns the float32 tensor of a key of `tensor_plan`.

    Raises:
        InvalidRequest: a tensor has another shape than the config says. Kernels trust the config,
            and would read beyond it.
    """

    def checked(name: str) -> torch.Tensor:
        tensor, expected = fused(name), _shape(config, name.rpartition(".")[2])
        if tuple(tensor.shape) != expected:
            raise InvalidRequest(
                f"the weights do not fit the model's config: {name!r} is {tuple(tensor.shape)}, "
                f"not {expected}"
            )
        return tensor

    layers = tuple(
        LayerWeights(**{name: checked(f"layers.{idx}.{name}") for name in _layer_parts(config)})
        for idx in range(config.num_layers)
    )
    embedding = checked("embedding")
    head = embedding if config.is_head_tied else checked("head")
    return DecoderWeights(embedding, layers, checked("final_norm"), head)


def _shape(config: ModelConfig, part: str) -> tuple[int, ...]:
    """Return the shape of a fused tensor, by the last part of its key of `tensor_plan`."""
    head_dim, hidden = config.head_dim, config.hidden_size
    num_query = config.num_heads * head_dim
    num_qkv = num_query + 2 * config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (config.vocab_size, hidden),
        "head": (config.vocab_size, hidden),
        "qkv": (num_qkv, hidden),
        "qkv_bias": (num_qkv,),
        "q_norm": (head_dim,),
        "k_norm": (head_dim,),
        "attention_out": (hidden, num_query),
        "gate_up": (2 * config.ffn_size, hidden),
        "down": (hidden, config.ffn_size),
    }
    # All others are norms of the residual stream.
    return shapes.get(part, (hidden,))


def placed(weights: DecoderWeights, placement: Placement) -> DecoderWeights:
    """Return a copy of all weights elsewhere; a tied head stays the embedding."""

    def move(weight: torch.Tensor) -> torch.Tensor:
        return weight.to(placement.device, placement.dtype)

    def moved(layer: LayerWeights) -> LayerWeights:
        parts = {name: value for name, value in vars(layer).items() if value is not None}
        return LayerWeights(**{name: move(value) for name, value in parts.items()})

    layers = tuple(map(moved, weights.layers))
    embedding = move(weights.embedding)
    head = embedding if weights.head is weights.embedding else move(weights.head)
    return DecoderWeights(embedding, layers, move(weights.final_norm), head)


def _layer_parts(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    parts = {**_NORMS, **_MATRICES, **(_FOUR_NORMS if config.has_post_norms else _TWO_NORMS)}
    if config.has_qkv_bias:
        parts |= _QKV_BIAS
    if config.has_qk_norm:
        parts |= _QK_NORM
    return parts
