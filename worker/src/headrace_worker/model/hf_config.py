"""`ModelConfig` out of a Hugging Face ``config.json``, of transformers 4 or 5."""

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

# Names of the gate's function that mean the same thing.
_ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU_TANH}
_GEMMA = ("gemma2", "gemma3_text")
# Where a file says nothing: as in transformers' classes.
_GEMMA3_PATTERN = 6
_GEMMA3_LOCAL_THETA = 10_000.0


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Read the values of a ``config.json``.

    Raises:
        InvalidRequest: an architecture or an option that this engine does not compute.
    """
    architecture = str(values.get("model_type"))
    check_architecture(architecture)
    if architecture == "gemma3":
        raise InvalidRequest(
            "model architecture 'gemma3' with images is not supported; take a text model "
            "(model_type gemma3_text)"
        )
    _refuse_options(architecture, values)
    rope = _rope(values)
    heads = int(values["num_attention_heads"])
    windows = _windows(architecture, values)
    return ModelConfig(
        architecture=architecture,
        num_layers=values["num_hidden_layers"],
        hidden_size=values["hidden_size"],
        ffn_size=values["intermediate_size"],
        num_heads=heads,
        num_kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        vocab_size=values["vocab_size"],
        context_tokens=values["max_position_embeddings"],
        rope_theta=float(rope.get("rope_theta") or values.get("rope_theta") or 10_000.0),
        rms_eps=float(values.get("rms_norm_eps", 1e-6)),
        is_head_tied=bool(values.get("tie_word_embeddings", architecture in _GEMMA)),
        eos_token_ids=_ids(values.get("eos_token_id")),
        bos_token_id=values.get("bos_token_id"),
        rope_scaling=_scaling(rope, values),
        has_qkv_bias=architecture == "qwen2",
        has_qk_norm=architecture in ("qwen3", "gemma3_text"),
        activation=_ACTIVATIONS[_activation(values)],
        window_tokens=int(values.get("sliding_window") or 0) if any(windows) else 0,
        windowed_layers=windows if any(windows) else (),
        **_gemma_options(architecture, values),
    )


def _gemma_options(architecture: str, values: Mapping[str, Any]) -> dict[str, Any]:
    if architecture not in _GEMMA:
        return {}
    return {
        "has_post_norms": True,
        "norm_offset": 1.0,
        "embedding_scale": float(values["hidden_size"]) ** 0.5,
        "attention_scale": float(values.get("query_pre_attn_scalar") or 256) ** -0.5,
        "attention_soft_cap": float(values.get("attn_logit_softcapping") or 0.0),
        "logit_soft_cap": float(values.get("final_logit_softcapping") or 0.0),
        "local_rope_theta": _local_theta(values) if architecture == "gemma3_text" else 0.0,
    }


def _local_theta(values: Mapping[str, Any]) -> float:
    local = (values.get("rope_parameters") or {}).get("sliding_attention") or {}
    if (scaling := local.get("rope_type", "default")) != "default":
        raise InvalidRequest(f"RoPE scaling {scaling!r} of windowed layers is not supported")
    return float(
        local.get("rope_theta") or values.get("rope_local_base_freq") or _GEMMA3_LOCAL_THETA
    )


def _windows(architecture: str, values: Mapping[str, Any]) -> tuple[bool, ...]:
    """Say of each layer whether it is windowed."""
    num_layers = int(values["num_hidden_layers"])
    if not values.get("sliding_window") or not values.get("use_sliding_window", True):
        return ()
    kinds = values.get("layer_types")
    if kinds:
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown:
            raise InvalidRequest(f"layer types {sorted(unknown)} are not supported")
        return tuple(kind == "sliding_attention" for kind in kinds)
    if architecture == "mistral":
        return (True,) * num_layers
    if architecture == "gemma2":
        return tuple(idx % 2 == 0 for idx in range(num_layers))
    if architecture == "gemma3_text":
        pattern = int(values.get("sliding_window_pattern") or _GEMMA3_PATTERN)
        return tuple(bool((idx + 1) % pattern) for idx in range(num_layers))
    if architecture in ("qwen2", "qwen3") and values.get("use_sliding_window"):
        first = int(values.get("max_window_layers") or num_layers)
        return tuple(idx >= first for idx in range(num_layers))
    return ()


def _activation(values: Mapping[str, Any]) -> str:
    return str(values.get("hidden_activation") or values.get("hidden_act") or "silu")


def _refuse_options(architecture: str, values: Mapping[str, Any]) -> None:
    # Qwen2's own biases are on queries, keys and values only, and no option.
    has_other_bias = bool(values.get("attention_bias")) and architecture != "qwen2"
    wrong = [
        name
        for name, is_wrong in (
            ("attention_bias", has_other_bias),
            ("mlp_bias", bool(values.get("mlp_bias"))),
            ("hidden_act", _activation(values) not in _ACTIVATIONS),
            ("quantization_config", bool(values.get("quantization_config"))),
            ("partial_rotary_factor", values.get("partial_rotary_factor", 1.0) not in (None, 1.0)),
            ("use_bidirectional_attention", bool(values.get("use_bidirectional_attention"))),
        )
        if is_wrong
    ]
    if wrong:
        options = ", ".join(f"{name}={values.get(name)!r}" for name in wrong)
        raise InvalidRequest(f"config.json sets what this engine does not compute: {options}")


def _rope(values: Mapping[str, Any]) -> Mapping[str, Any]:
    # transformers 5 writes rope_parameters, for Gemma 3 one set per kind of layer; 4 wrote
    # rope_scaling beside rope_theta.
    rope: Mapping[str, Any] = values.get("rope_parameters") or values.get("rope_scaling") or {}
    full: Mapping[str, Any] = rope.get("full_attention", rope)
    return full


def _scaling(rope: Mapping[str, Any], values: Mapping[str, Any]) -> RopeScaling:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind == "factors":
        raise InvalidRequest("RoPE scaling 'factors' does not exist in config.json files")
    if rope.get("mscale") or rope.get("mscale_all_dim"):
        raise InvalidRequest("RoPE scaling with mscale is not supported")
    original = rope.get("original_max_position_embeddings")
    if kind == "yarn" and not original:
        original = values["max_position_embeddings"]
    return RopeScaling(
        kind=kind,
        factor=float(rope.get("factor") or 1.0),
        low_freq_factor=float(rope.get("low_freq_factor") or 1.0),
        high_freq_factor=float(rope.get("high_freq_factor") or 4.0),
        original_context_tokens=int(original or 8192),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=float(rope.get("attention_factor") or 0.0),
        does_truncate=bool(rope.get("truncate", True)),
    )


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
