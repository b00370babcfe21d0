"""Tiny random Llama checkpoints, written as a Hugging Face folder or as a GGUF file.

Both writers put down the same weights, so what is loaded from one can be compared with the other.
The tokenizer is byte-level BPE over 256 bytes, a few merges and three special tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID = 1, 2
MERGES = ("t h", "th e", "a n", "Ġ a", "Ġ the", "1 2")
TOKENS = (
    *SPECIAL_TOKENS,
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
)
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
_SPREAD = 0.25


@dataclass(frozen=True)
class TinyShape:
    """Sizes of a tiny model; `rope` is written to config.json as rope_scaling."""

    num_layers: int = 2
    hidden_size: int = 64
    ffn_size: int = 96
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    context_tokens: int = 256
    is_head_tied: bool = True
    rope_theta: float = 10_000.0
    rms_eps: float = 1e-5
    rope: dict[str, Any] | None = None


def tiny_weights(shape: TinyShape, seed: int = 0) -> dict[str, torch.Tensor]:
    """Draw float32 weights by their Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * _SPREAD

    hidden, head_dim = shape.hidden_size, shape.head_dim
    weights = {"model.embed_tokens.weight": draw(len(TOKENS), hidden)}
    for idx in range(shape.num_layers):
        prefix = f"model.layers.{idx}"
        weights |= {
            f"{prefix}.input_layernorm.weight": 1 + draw(hidden),
            f"{prefix}.self_attn.q_proj.weight": draw(shape.num_heads * head_dim, hidden),
            f"{prefix}.self_attn.k_proj.weight": draw(shape.num_kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.v_proj.weight": draw(shape.num_kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.o_proj.weight": draw(hidden, shape.num_heads * head_dim),
            f"{prefix}.post_attention_layernorm.weight": 1 + draw(hidden),
            f"{prefix}.mlp.gate_proj.weight": draw(shape.ffn_size, hidden),
            f"{prefix}.mlp.up_proj.weight": draw(shape.ffn_size, hidden),
            f"{prefix}.mlp.down_proj.weight": draw(hidden, shape.ffn_size),
        }
    weights["model.norm.weight"] = 1 + draw(hidden)
    if not shape.is_head_tied:
        weights["lm_head.weight"] = draw(len(TOKENS), hidden)
    return weights


def tiny_tokenizer() -> Tokenizer:
    """Build the tokenizer of a tiny model."""
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(TOKENS)},
            merges=[(left, right) for left, right in (merge.split(" ") for merge in MERGES)],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIAL_TOKENS])
    return tokenizer


def hf_config(shape: TinyShape) -> dict[str, Any]:
    """Return the config.json of a tiny model."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": len(TOKENS),
        "max_position_embeddings": shape.context_tokens,
        "rope_theta": shape.rope_theta,
        "rope_scaling": shape.rope,
        "rms_norm_eps": shape.rms_eps,
        "tie_word_embeddings": shape.is_head_tied,
        "hidden_act": "silu",
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }


def write_hf_folder(
    folder: Path,
    shape: TinyShape | None = None,
    *,
    seed: int = 0,
    num_shards: int = 1,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Write a Hugging Face folder and return its weights as float32."""
    shape = shape or TinyShape()
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.to(dtype) for name, value in tiny_weights(shape, seed).items()}
    _write_shards(folder, weights, num_shards)
    tokenizer_config = {
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": {"content": SPECIAL_TOKENS[EOS_ID]},
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "config.json").write_text(json.dumps(hf_config(shape)), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    (folder / "tokenizer.json").write_text(tiny_tokenizer().to_str(), encoding="utf-8")
    return {name: value.float() for name, value in weights.items()}


def _write_shards(folder: Path, weights: dict[str, torch.Tensor], num_shards: int) -> None:
    if num_shards == 1:
        save_file(weights, folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    names = list(weights)
    for idx in range(num_shards):
        file = f"model-{idx + 1:05d}-of-{num_shards:05d}.safetensors"
        mine = names[idx::num_shards]
        save_file({name: weights[name] for name in mine}, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def write_gguf(
    path: Path,
    shape: TinyShape | None = None,
    *,
    seed: int = 0,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, str] | None = None,
    sampling: dict[str, float] | None = None,
) -> dict[str, torch.Tensor]:
    """Write a GGUF file as llama.cpp's converter would.

    Args:
        path: the file.
        shape: sizes; its `rope` is left out.
        seed: of the weights.
        quantization: type of the matrices; norms stay float32.
        metadata: string values that replace the usual ones, to write broken files.
        sampling: what the file recommends, by the ends of `general.sampling.*`.

    Returns:
        The weights that a reader should find, by their Hugging Face names.
    """
    shape = shape or TinyShape()
    replaced = metadata or {}
    writer = gguf.GGUFWriter(path, replaced.get("general.architecture", "llama"))
    _add_sizes(writer, shape)
    _add_tokenizer(writer, replaced)
    for name, value in (sampling or {}).items():
        key = f"general.sampling.{name}"
        if isinstance(value, int):
            writer.add_int32(key, value)
        else:
            writer.add_float32(key, value)
    expected = {}
    for name, weight in tiny_weights(shape, seed).items():
        values = _permuted(weight.numpy(), name, shape)
        kind = quantization if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        stored = gguf.quantize(values, kind)
        writer.add_tensor(_gguf_name(name), stored, raw_dtype=kind)
        found = torch.from_numpy(np.ascontiguousarray(gguf.dequantize(stored, kind)))
        expected[name] = _unpermuted(found, name, shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _add_sizes(writer: gguf.GGUFWriter, shape: TinyShape) -> None:
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.context_tokens)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.ffn_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_eps)


def _add_tokenizer(writer: gguf.GGUFWriter, replaced: dict[str, str]) -> None:
    writer.add_tokenizer_model(replaced.get("tokenizer.ggml.model", "gpt2"))
    writer.add_tokenizer_pre(replaced.get("tokenizer.ggml.pre", "gpt-2"))
    writer.add_token_list(list(TOKENS))
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in TOKENS])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_add_bos_token(value=False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _num_heads(name: str, shape: TinyShape) -> int | None:
    if "q_proj" in name:
        return shape.num_heads
    return shape.num_kv_heads if "k_proj" in name else None


def _permuted(values: Any, name: str, shape: TinyShape) -> Any:
    """Interleave the halves of each head as llama.cpp's converter does."""
    heads = _num_heads(name, shape)
    if heads is None:
        return values
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, values.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _unpermuted(values: torch.Tensor, name: str, shape: TinyShape) -> torch.Tensor:
    heads = _num_heads(name, shape)
    if heads is None:
        return values
    order = np.arange(values.shape[0]).reshape(-1, 1)
    where = torch.from_numpy(_permuted(order, name, shape).reshape(-1))
    restored = torch.empty_like(values)
    restored[where] = values
    return restored


def _gguf_name(name: str) -> str:
    for hf, short in (
        ("model.embed_tokens", "token_embd"),
        ("model.layers", "blk"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ):
        name = name.replace(hf, short)
    return name
