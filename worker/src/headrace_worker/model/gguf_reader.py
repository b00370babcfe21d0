"""Reading a GGUF file: shape, tensors by their Hugging Face names, tokenizer and chat template.

llama.cpp's converter permutes the rows of Llama's query and key matrices for interleaved RoPE; they
are put back into the half-split order here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf import GGUFReader, dequantize

from headrace_common.errors import InvalidRequest
from headrace_worker.kernels.blocks import ByteArray, from_gguf
from headrace_worker.model.config import ModelConfig, RopeScaling, check_architecture

_GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_SPECIAL_TOKENS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}
_ROPE_FACTORS = "rope_freqs.weight"

FloatArray = np.ndarray[Any, np.dtype[np.float32]]
_Rows = TypeVar("_Rows", FloatArray, ByteArray)


class GgufFile:
    """An open GGUF file of a supported architecture.

    Attributes:
        metadata: all key-value pairs, arrays as lists.
        config: the model's shape.
    """

    def __init__(self, path: Path) -> None:
        try:
            reader = GGUFReader(path)
        except ValueError as error:
            raise InvalidRequest(f"{path} is not a readable GGUF file: {error}") from error
        self.metadata: Mapping[str, Any] = {
            key: field.contents()
            for key, field in reader.fields.items()
            if not key.startswith("GGUF.")
        }
        check_architecture(str(self.metadata.get("general.architecture")))
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.config = self._read_config()

    @property
    def chat_template(self) -> str:
        """The Jinja template, empty if there is none."""
        return str(self.metadata.get("tokenizer.chat_template", ""))

    @property
    def special_tokens(self) -> dict[str, str]:
        """Spellings by name ("bos_token", ...)."""
        tokens = self.metadata["tokenizer.ggml.tokens"]
        ids = {name: self._token_id(key) for name, key in _SPECIAL_TOKENS.items()}
        return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}

    def tensor(self, hf_name: str) -> FloatArray:
        """Return one tensor by its Hugging Face name, dequantised, (out, in).

        Raises:
            InvalidRequest: it is missing, or stored in a way that cannot be dequantised.
        """
        return self._in_order(hf_name, self._dequantised(self._known_name(hf_name)))

    def blocks(self, hf_name: str) -> ByteArray | None:
        """Return a matrix's rows as `kernels.blocks` has them; None if it is not stored so."""
        tensor = self._tensors[self._known_name(hf_name)]
        rows = from_gguf(tensor.data, tensor.tensor_type.name)
        return None if rows is None else self._in_order(hf_name, rows)

    def shape(self, hf_name: str) -> tuple[int, ...]:
        """Return a tensor's shape, (out, in), without reading it."""
        return tuple(int(size) for size in reversed(self._tensors[self._known_name(hf_name)].shape))

    def _in_order(self, hf_name: str, rows: _Rows) -> _Rows:
        if hf_name.endswith("q_proj.weight"):
            return _half_split(rows, self.config.num_heads)
        if hf_name.endswith("k_proj.weight"):
            return _half_split(rows, self.config.num_kv_heads)
        return rows

    def _known_name(self, hf_name: str) -> str:
        name = _gguf_name(hf_name)
        if name not in self._tensors:
            raise InvalidRequest(f"the GGUF file lacks the tensor {name!r}")
        return name

    def _dequantised(self, name: str) -> FloatArray:
        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise InvalidRequest(f"tensor {name!r} has the unsupported type {kind}") from error
        return np.ascontiguousarray(values, dtype=np.float32)

    def _read_config(self) -> ModelConfig:
        arch = self.metadata["general.architecture"]
        meta = {
            key.removeprefix(f"{arch}."): value
            for key, value in self.metadata.items()
            if key.startswith(f"{arch}.")
        }
        heads = meta["attention.head_count"]
        head_dim = meta.get("attention.key_length") or meta["embedding_length"] // heads
        if meta.get("rope.dimension_count", head_dim) != head_dim:
            raise InvalidRequest("partial RoPE (rope.dimension_count) is not supported")
        return ModelConfig(
            architecture=arch,
            num_layers=meta["block_count"],
            hidden_size=meta["embedding_length"],
            ffn_size=meta["feed_forward_length"],
            num_heads=heads,
            num_kv_heads=meta.get("attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab_size=len(self.metadata["tokenizer.ggml.tokens"]),
            context_tokens=meta["context_length"],
            rope_theta=meta.get("rope.freq_base", 10_000.0),
            rms_eps=meta["attention.layer_norm_rms_epsilon"],
            is_head_tied="output.weight" not in self._tensors,
            eos_token_ids=self._eos_token_ids(),
            bos_token_id=self._token_id("bos"),
            add_bos=bool(self.metadata.get("tokenizer.ggml.add_bos_token", False)),
            rope_scaling=self._rope_scaling(meta),
        )

    def _rope_scaling(self, meta: Mapping[str, Any]) -> RopeScaling:
        if _ROPE_FACTORS in self._tensors:
            factors = tuple(float(x) for x in self._dequantised(_ROPE_FACTORS))
            return RopeScaling(kind="factors", factors=factors)
        kind = meta.get("rope.scaling.type", "none")
        if kind == "none":
            return RopeScaling()
        if kind != "linear":
            raise InvalidRequest(f"RoPE scaling {kind!r} in a GGUF file is not supported")
        return RopeScaling(kind="linear", factor=float(meta["rope.scaling.factor"]))

    def _eos_token_ids(self) -> tuple[int, ...]:
        ids = [self._token_id("eos"), self._token_id("eot")]
        return tuple(dict.fromkeys(i for i in ids if i is not None))

    def _token_id(self, name: str) -> int | None:
        return self.metadata.get(f"tokenizer.ggml.{name}_token_id")


def _gguf_name(hf_name: str) -> str:
    if hf_name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[hf_name]
    _, _, layer_idx, part = hf_name.removesuffix(".weight").split(".", maxsplit=3)
    return f"blk.{layer_idx}.{_LAYER_NAMES[part]}.weight"


def _half_split(values: _Rows, num_heads: int) -> _Rows:
    """Undo the converter's interleaving of each head's rows."""
    num_out, num_in = values.shape
    pairs = values.reshape(num_heads, num_out // num_heads // 2, 2, num_in)
    restored: _Rows = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(num_out, num_in))
    return restored
