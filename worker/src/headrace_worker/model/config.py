"""The shape of a model: everything a forward pass needs to know besides the weights.

One description for a family of decoders that differ in few places: biases, norms on queries and
keys, norms behind the attention and the feed-forward part, the gate's function, windows, soft caps.
`model.hf_config` reads it from a Hugging Face ``config.json``, `model.gguf_config` from a GGUF
file. What the engine cannot compute exactly is refused by name, before any weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headrace_common.errors import InvalidRequest

# Each name as GGUF and as Hugging Face spell it.
SUPPORTED_ARCHITECTURES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "gemma3_text",
)
_ROPE_KINDS = ("default", "linear", "llama3", "yarn", "factors")
_SIZES = (
    "num_layers",
    "hidden_size",
    "ffn_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "context_tokens",
)
SILU, GELU_TANH = "silu", "gelu_tanh"


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for a longer context.

    ``linear`` divides all frequencies by *factor*; ``llama3`` divides the low ones and blends the
    middle ones (Llama 3.1, as in transformers' ``_compute_llama3_parameters``); ``yarn`` blends by
    turns within the original context and scales cosines and sines (arXiv 2309.00071);
    ``factors`` divides each by its own number (GGUF's ``rope_freqs.weight``).

    Attributes:
        low_freq_factor: llama3: turns below which a wave is slowed down.
        high_freq_factor: llama3: turns above which it is left alone.
        beta_fast: yarn: turns above which a wave is left alone.
        beta_slow: yarn: turns below which it is slowed down.
        attention_factor: yarn: multiplies cosines and sines; 0 = 0.1 ln(factor) + 1.
        does_truncate: yarn: round the two borders outwards to whole dimensions.
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192
    factors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    does_truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in _ROPE_KINDS:
            raise InvalidRequest(
                f"RoPE scaling {self.kind!r} is not supported; known: {_ROPE_KINDS}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a decoder.

    Attributes:
        num_layers: decoder layers.
        hidden_size: width of the residual stream.
        ffn_size: width inside the gated feed-forward part.
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
        has_qkv_bias: queries, keys and values have a bias (Qwen2).
        has_qk_norm: each query and key head is normed before RoPE (Qwen3, Gemma 3).
        has_post_norms: the attention's and the feed-forward part's results are normed before they
            are added (Gemma 2 and 3).
        activation: of the gate, SILU or GELU_TANH.
        embedding_scale: multiplies the embedding's rows (Gemma: the root of the hidden size).
        attention_scale: multiplies the scores; 0 = 1 / sqrt(D).
        attention_soft_cap: scores s become c tanh(s / c); 0 = they stay (Gemma 2).
        logit_soft_cap: the same for logits.
        window_tokens: positions that a windowed layer sees, the token itself included; 0 = no layer
            is windowed.
        windowed_layers: whether each layer is windowed; empty = none is.
        local_rope_theta: base of the rotary frequencies in windowed layers, never scaled; 0 = as in
            the others (Gemma 3).
        norm_offset: added to every norm's weight when a checkpoint is read (Gemma's are stored less
            one).
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
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    has_post_norms: bool = False
    activation: str = SILU
    embedding_scale: float = 1.0
    attention_scale: float = 0.0
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    window_tokens: int = 0
    windowed_layers: tuple[bool, ...] = ()
    local_rope_theta: float = 0.0
    norm_offset: float = 0.0

    def __post_init__(self) -> None:
        check_architecture(self.architecture)
        for name in _SIZES:
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise InvalidRequest(f"{name} is {size!r}; it must be a whole number above 0")
        if self.num_heads % self.num_kv_heads:
            raise InvalidRequest(
                f"{self.num_heads} query heads do not divide over {self.num_kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise InvalidRequest(f"head size {self.head_dim} is odd; RoPE needs pairs")
        if self.activation not in (SILU, GELU_TANH):
            raise InvalidRequest(f"the activation {self.activation!r} is not supported")
        if self.windowed_layers and len(self.windowed_layers) != self.num_layers:
            raise InvalidRequest(
                f"windows are given for {len(self.windowed_layers)} of {self.num_layers} layers"
            )

    def window_of(self, layer_idx: int) -> int:
        """Positions that a layer sees, the token itself included; 0 = all."""
        is_windowed = bool(self.windowed_layers) and self.windowed_layers[layer_idx]
        return self.window_tokens if is_windowed else 0

    @property
    def score_scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.attention_scale or self.head_dim**-0.5

    @property
    def kv_bytes_per_token(self) -> int:
        """KV memory per token over all layers, float32 keys and values."""
        return 4 * 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Weights of the model, a tied head counted once."""
        qkv_heads = self.num_heads + 2 * self.num_kv_heads
        qkv = qkv_heads * self.head_dim * (self.hidden_size + self.has_qkv_bias)
        out = self.num_heads * self.head_dim * self.hidden_size
        norms = (4 if self.has_post_norms else 2) * self.hidden_size
        norms += 2 * self.head_dim * self.has_qk_norm
        layer = qkv + out + 3 * self.ffn_size * self.hidden_size + norms
        embeddings = (1 if self.is_head_tied else 2) * self.vocab_size * self.hidden_size
        return self.num_layers * layer + embeddings + self.hidden_size

    def to_json(self) -> dict[str, Any]:
        """Return plain values for ``json.dumps``; `from_json` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Rebuild what `to_json` wrote; what an older version did not know keeps its default."""
        scaling = dict(values["rope_scaling"])
        scaling["factors"] = tuple(scaling["factors"])
        plain = {
            **values,
            "eos_token_ids": tuple(values["eos_token_ids"]),
            "windowed_layers": tuple(values.get("windowed_layers", ())),
        }
        return cls(**{**plain, "rope_scaling": RopeScaling(**scaling)})


def check_architecture(name: str) -> None:
    """Refuse an architecture that this engine cannot compute.

    Raises:
        InvalidRequest: with the name and what is supported.
    """
    if name not in SUPPORTED_ARCHITECTURES:
        known = ", ".join(SUPPORTED_ARCHITECTURES)
        raise InvalidRequest(f"model architecture {name!r} is not supported; supported: {known}")
