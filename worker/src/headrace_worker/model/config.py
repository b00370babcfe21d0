"""The shape of a model: everything a forward pass needs to know besides the weights.

`ModelConfig.from_hf` reads a Hugging Face ``config.json``; the GGUF reader builds one itself. What
the engine cannot compute exactly is refused by name, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headrace_common.errors import InvalidRequest

# GGUF and Hugging Face spell it alike.
SUPPORTED_ARCHITECTURES = ("llama",)
_ROPE_KINDS = ("default", "linear", "llama3", "factors")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for a longer context.

    ``linear`` divides all frequencies by *factor*; ``llama3`` divides the low ones and blends the
    middle ones (Llama 3.1, as in transformers' ``_compute_llama3_parameters``); ``factors`` divides
    each by its own number (GGUF's ``rope_freqs.weight``).
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in _ROPE_KINDS:
            raise InvalidRequest(
                f"RoPE scaling {self.kind!r} is not supported; known: {_ROPE_KINDS}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a Llama-shaped decoder.

    Attributes:
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        ffn_size: width inside the SwiGLU.
        num_heads: query heads, H.
        num_kv_heads: key and value heads, K; divides H.
        head_dim: size of a head, D.
        vocab_size: rows of the embedding, V.
        context_tokens: prompt and output together.
        rope_theta: base of the rotary frequencies.
        rms_eps: added to the mean square in every norm.
        is_head_tied: the output head is the embedding.
        eos_token_ids: ids that end an answer.
        bos_token_id: begin-of-text id; None = the model has none.
        add_bos: raw prompts begin with it.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    rope_theta: float
    rms_eps: float
    is_head_tied: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    add_bos: bool = False
    rope_scaling: RopeScaling = RopeScaling()

    def __post_init__(self) -> None:
        check_architecture(self.architecture)
        if self.num_heads % self.num_kv_heads:
            raise InvalidRequest(
                f"{self.num_heads} query heads do not divide over {self.num_kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise InvalidRequest(f"head size {self.head_dim} is odd; RoPE needs pairs")

    @property
    def kv_bytes_per_token(self) -> int:
        """KV memory per token over all layers, float32 keys and values."""
        return 4 * 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Weights of the model, a tied head counted once."""
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.hidden_size
        out = self.num_heads * self.head_dim * self.hidden_size
        layer = qkv + out + 3 * self.ffn_size * self.hidden_size + 2 * self.hidden_size
        embeddings = (1 if self.is_head_tied else 2) * self.vocab_size * self.hidden_size
        return self.num_layers * layer + embeddings + self.hidden_size

    def to_json(self) -> dict[str, Any]:
        """Return plain values for ``json.dumps``; `from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Rebuild what `to_json` wrote."""
        scaling = dict(values["rope_scaling"])
        scaling["factors"] = tuple(scaling["factors"])
        plain = {**values, "eos_token_ids": tuple(values["eos_token_ids"])}
        return cls(**{**plain, "rope_scaling": RopeScaling(**scaling)})

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face ``config.json``, of transformers 4 or 5.

        Raises:
            InvalidRequest: an architecture or an option that this engine does not compute.
        """
        check_architecture(str(values.get("model_type")))
        _refuse_hf_options(values)
        rope = _hf_rope(values)
        heads = int(values["num_attention_heads"])
        return cls(
            architecture=values["model_type"],
            num_layers=values["num_hidden_layers"],
            hidden_size=values["hidden_size"],
            ffn_size=values["intermediate_size"],
            num_heads=heads,
            num_kv_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or values["hidden_size"] // heads,
            vocab_size=values["vocab_size"],
            context_tokens=values["max_position_embeddings"],
            rope_theta=float(rope.get("rope_theta") or values.get("rope_theta") or 10_000.0),
            rms_eps=values.get("rms_norm_eps", 1e-6),
            is_head_tied=bool(values.get("tie_word_embeddings", False)),
            eos_token_ids=_ids(values.get("eos_token_id")),
            bos_token_id=values.get("bos_token_id"),
            rope_scaling=_hf_scaling(rope),
        )


def check_architecture(name: str) -> None:
    """Refuse an architecture that this engine cannot compute.

    Raises:
        InvalidRequest: with the name and what is supported.
    """
    if name not in SUPPORTED_ARCHITECTURES:
        known = ", ".join(SUPPORTED_ARCHITECTURES)
        raise InvalidRequest(f"model architecture {name!r} is not supported; supported: {known}")


def _refuse_hf_options(values: Mapping[str, Any]) -> None:
    wrong = [
        name
        for name, is_wrong in (
            ("attention_bias", bool(values.get("attention_bias"))),
            ("mlp_bias", bool(values.get("mlp_bias"))),
            ("hidden_act", values.get("hidden_act", "silu") != "silu"),
            ("quantization_config", bool(values.get("quantization_config"))),
            ("partial_rotary_factor", values.get("partial_rotary_factor", 1.0) not in (None, 1.0)),
        )
        if is_wrong
    ]
    if wrong:
        options = ", ".join(f"{name}={values[name]!r}" for name in wrong)
        raise InvalidRequest(f"config.json sets what this engine does not compute: {options}")


def _hf_rope(values: Mapping[str, Any]) -> Mapping[str, Any]:
    # transformers 5 writes rope_parameters, 4 wrote rope_scaling beside rope_theta.
    rope: Mapping[str, Any] = values.get("rope_parameters") or values.get("rope_scaling") or {}
    return rope


def _hf_scaling(rope: Mapping[str, Any]) -> RopeScaling:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind == "factors":
        raise InvalidRequest("RoPE scaling 'factors' does not exist in config.json files")
    return RopeScaling(
        kind=kind,
        factor=float(rope.get("factor") or 1.0),
        low_freq_factor=float(rope.get("low_freq_factor") or 1.0),
        high_freq_factor=float(rope.get("high_freq_factor") or 4.0),
        original_context_tokens=int(rope.get("original_max_position_embeddings") or 8192),
    )


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
