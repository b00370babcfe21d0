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
from headrace_worker.model.config import ModelConfig, check_architecture
from headrace_worker.model.damage import refusing_damage
from headrace_worker.model.gguf_config import config_from_gguf, token_id
from headrace_worker.sampling_defaults import SamplingDefaults

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
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_POST_NORM_NAMES = {
    **_LAYER_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# Whose query and key rows the converter interleaves.
_PERMUTED = ("llama",)
_SPECIAL_TOKENS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}
_ROPE_FACTORS = "rope_freqs.weight"

FloatArray = np.ndarray[Any, np.dtype[np.float32]]
_Rows = TypeVar("_Rows", FloatArray, ByteArray)


class _Metadata(dict[str, Any]):
    """Key-value pairs that say which one is missing."""

    def __missing__(self, key: str) -> Any:
        raise InvalidRequest(f"the GGUF file lacks the key {key!r}")


class GgufFile:
    """An open GGUF file of a supported architecture.

    Attributes:
        metadata: all key-value pairs, arrays as lists.
        config: the model's shape.
    """

    def __init__(self, path: Path) -> None:
        with refusing_damage(path, "GGUF file"):
            reader = GGUFReader(path)
            self.metadata: Mapping[str, Any] = _Metadata(
                (key, field.contents())
                for key, field in reader.fields.items()
                if not key.startswith("GGUF.")
            )
            check_architecture(str(self.metadata.get("general.architecture")))
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
            self.config = config_from_gguf(
                self.metadata,
                is_head_tied=_GLOBAL_NAMES["lm_head.weight"] not in self._tensors,
                rope_factors=self._rope_factors(),
            )

    @property
    def chat_template(self) -> str:
        """The Jinja template, empty if there is none."""
        return str(self.metadata.get("tokenizer.chat_template", ""))

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """What the file recommends."""
        return SamplingDefaults.of_gguf(self.metadata)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Spellings by name ("bos_token", ...)."""
        tokens = self.metadata["tokenizer.ggml.tokens"]
        ids = {name: token_id(self.metadata, key) for name, key in _SPECIAL_TOKENS.items()}
        return {name: tokens[found] for name, found in ids.items() if found is not None}

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

    def _rope_factors(self) -> tuple[float, ...]:
        if _ROPE_FACTORS not in self._tensors:
            return ()
        return tuple(float(x) for x in self._dequantised(_ROPE_FACTORS))

    def _in_order(self, hf_name: str, rows: _Rows) -> _Rows:
        if self.config.architecture not in _PERMUTED:
            return rows
        if hf_name.endswith("q_proj.weight"):
            return _half_split(rows, self.config.num_heads)
        if hf_name.endswith("k_proj.weight"):
            return _half_split(rows, self.config.num_kv_heads)
        return rows

    def _known_name(self, hf_name: str) -> str:
        name = _gguf_name(hf_name, self.config)
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


def _gguf_name(hf_name: str, config: ModelConfig) -> str:
    if hf_name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[hf_name]
    _, _, layer_idx, path = hf_name.split(".", maxsplit=3)
    part, _, kind = path.rpartition(".")
    names = _POST_NORM_NAMES if config.has_post_norms else _LAYER_NAMES
    return f"blk.{layer_idx}.{names[part]}.{kind}"


def _half_split(values: _Rows, num_heads: int) -> _Rows:
    """Undo the converter's interleaving of each head's rows."""
    num_out, num_in = values.shape
    pairs = values.reshape(num_heads, num_out // num_heads // 2, 2, num_in)
    restored: _Rows = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(num_out, num_in))
    return restored
