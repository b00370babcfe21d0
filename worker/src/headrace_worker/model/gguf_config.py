"""`ModelConfig` out of a GGUF file's metadata.

Keys and their defaults are those of llama.cpp (``llama-arch.cpp``, ``llama-model.cpp``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_common.errors import InvalidRequest
from headrace_worker.model.config import (
    GELU_TANH,
    SILU,
    ModelConfig,
    RopeScaling,
    check_architecture,
)

_GEMMA = ("gemma2", "gemma3")
_GEMMA2_PATTERN, _GEMMA3_PATTERN = 2, 6
_GEMMA3_LOCAL_THETA = 10_000.0
# The only Gemma 3 whose scores are not divided by the root of the head size.
_GEMMA3_27B_LAYERS = 62


class _Keys(dict[str, Any]):
    """The keys of an architecture without its prefix."""

    def __init__(self, arch: str, metadata: Mapping[str, Any]) -> None:
        prefix = f"{arch}."
        super().__init__(
            (key.removeprefix(prefix), value)
            for key, value in metadata.items()
            if key.startswith(prefix)
        )
        self._prefix = prefix

    def __missing__(self, key: str) -> Any:
        raise InvalidRequest(f"the GGUF file lacks the key {self._prefix + key!r}")


def config_from_gguf(
    metadata: Mapping[str, Any], *, is_head_tied: bool, rope_factors: tuple[float, ...] = ()
) -> ModelConfig:
    """Read the shape of a model.

    Args:
        metadata: all key-value pairs of the file.
        is_head_tied: the file has no output matrix of its own.
        rope_factors: the tensor ``rope_freqs.weight``; empty = the file has none.

    Raises:
        InvalidRequest: an architecture or an option that this engine does not compute.
    """
    arch = str(metadata.get("general.architecture"))
    check_architecture(arch)
    meta = _Keys(arch, metadata)
    heads = meta["attention.head_count"]
    head_dim = meta.get("attention.key_length") or meta["embedding_length"] // heads
    _refuse_options(meta, head_dim)
    windows = _windows(arch, meta)
    return ModelConfig(
        architecture=arch,
        num_layers=meta["block_count"],
        hidden_size=meta["embedding_length"],
        ffn_size=meta["feed_forward_length"],
        num_heads=heads,
        num_kv_heads=meta.get("attention.head_count_kv", heads),
        head_dim=head_dim,
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        context_tokens=meta["context_length"],
        rope_theta=meta.get("rope.freq_base", 10_000.0),
        rms_eps=meta["attention.layer_norm_rms_epsilon"],
        is_head_tied=is_head_tied,
        eos_token_ids=_eos_token_ids(metadata),
        bos_token_id=token_id(metadata, "bos"),
        add_bos=_adds_bos(metadata),
        rope_scaling=_rope_scaling(meta, rope_factors),
        has_qkv_bias=arch == "qwen2",
        has_qk_norm=arch in ("qwen3", "gemma3"),
        activation=GELU_TANH if arch in _GEMMA else SILU,
        window_tokens=meta.get("attention.sliding_window", 0) if windows else 0,
        windowed_layers=windows,
        **_gemma_options(arch, meta, head_dim),
    )


def token_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """Return the id of a special token by GGUF's name for it; None if there is none."""
    found: int | None = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return found


def _gemma_options(arch: str, meta: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    # The converter has added Gemma's one to the norms already.
    if arch not in _GEMMA:
        return {}
    per_head = meta["embedding_length"] // meta["attention.head_count"]
    is_27b = arch == "gemma3" and meta["block_count"] == _GEMMA3_27B_LAYERS
    return {
        "has_post_norms": True,
        "embedding_scale": float(meta["embedding_length"]) ** 0.5,
        "attention_scale": float(per_head if is_27b else head_dim) ** -0.5,
        "attention_soft_cap": meta.get("attn_logit_softcapping", 50.0 if arch == "gemma2" else 0.0),
        "logit_soft_cap": meta.get("final_logit_softcapping", 30.0 if arch == "gemma2" else 0.0),
        "local_rope_theta": _GEMMA3_LOCAL_THETA if arch == "gemma3" else 0.0,
    }


def _windows(arch: str, meta: Mapping[str, Any]) -> tuple[bool, ...]:
    if not meta.get("attention.sliding_window"):
        return ()
    num_layers = meta["block_count"]
    if arch in _GEMMA:
        pattern = meta.get("attention.sliding_window_pattern") or (
            _GEMMA3_PATTERN if arch == "gemma3" else _GEMMA2_PATTERN
        )
        if isinstance(pattern, list):
            return tuple(map(bool, pattern))
        return tuple(bool((idx + 1) % pattern) for idx in range(num_layers))
    raise InvalidRequest(f"attention.sliding_window in a GGUF file of {arch!r} is not supported")


def _refuse_options(meta: Mapping[str, Any], head_dim: int) -> None:
    if meta.get("rope.dimension_count", head_dim) != head_dim:
        raise InvalidRequest("partial RoPE (rope.dimension_count) is not supported")
    if meta.get("attention.value_length", head_dim) != head_dim:
        raise InvalidRequest("values of another size than keys are not supported")
    if meta.get("expert_count"):
        raise InvalidRequest("mixtures of experts (expert_count) are not supported")


def _rope_scaling(meta: Mapping[str, Any], rope_factors: tuple[float, ...]) -> RopeScaling:
    if rope_factors:
        return RopeScaling(kind="factors", factors=rope_factors)
    kind = meta.get("rope.scaling.type", "none")
    if kind == "none":
        return RopeScaling()
    if kind not in ("linear", "yarn"):
        raise InvalidRequest(f"RoPE scaling {kind!r} in a GGUF file is not supported")
    original = meta.get("rope.scaling.original_context_length") or meta["context_length"]
    return RopeScaling(
        kind=kind,
        factor=float(meta["rope.scaling.factor"]),
        original_context_tokens=int(original),
        beta_fast=float(meta.get("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(meta.get("rope.scaling.yarn_beta_slow", 1.0)),
    )


def _eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    ids = [token_id(metadata, "eos"), token_id(metadata, "eot")]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    # SentencePiece models begin with it unless told otherwise, byte-level ones the other way round.
    default = metadata.get("tokenizer.ggml.model") == "llama"
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))
