"""Model shapes: what is read, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace_common.errors import InvalidRequest
from headrace_testing.tiny_model import TinyShape, hf_config, tiny_weights
from headrace_worker.model.config import ModelConfig, RopeScaling
from headrace_worker.model.hf_config import config_from_hf


def hf(**changes: Any) -> dict[str, Any]:
    return {**hf_config(TinyShape()), **changes}


def test_reads_sizes_from_a_hf_config() -> None:
    """Every size of the folder's config.json arrives in its place."""
    config = config_from_hf(hf(eos_token_id=[2, 0]))
    assert (config.num_layers, config.hidden_size, config.ffn_size) == (2, 64, 96)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.context_tokens, config.eos_token_ids, config.bos_token_id) == (256, (2, 0), 1)
    assert config.kv_bytes_per_token == 4 * 2 * 2 * 2 * 16


def test_missing_optional_fields_have_their_usual_meaning() -> None:
    """Without KV heads and head size each query head has its own KV head of D = hidden / H."""
    values = hf()
    for name in ("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling"):
        del values[name]
    config = config_from_hf(values)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 16, 10_000.0)
    assert config.rope_scaling == RopeScaling()


def test_reads_rope_parameters_of_transformers_5() -> None:
    """Theta and scaling may both be in rope_parameters."""
    rope = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    config = config_from_hf(hf(rope_parameters=rope, rope_theta=None))
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(kind="linear", factor=2.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": None}, "None"),
        ({"model_type": "gemma3"}, "images"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0}}, "mscale"),
        ({"sliding_window": 8, "layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_attention_heads": 5, "head_dim": 16}, "5 query heads"),
        ({"head_dim": 15}, "15"),
    ],
)
def test_refuses_by_name_what_it_cannot_compute(changes: dict[str, Any], named: str) -> None:
    """A model that would come out wrong is refused, and the message says what is wrong."""
    with pytest.raises(InvalidRequest, match=named):
        config_from_hf(hf(**changes))


@pytest.mark.parametrize("is_head_tied", [True, False])
def test_counts_parameters(*, is_head_tied: bool) -> None:
    """The count equals the checkpoint's."""
    shape = TinyShape(is_head_tied=is_head_tied)
    counted = sum(weight.numel() for weight in tiny_weights(shape).values())
    assert config_from_hf(hf_config(shape)).num_parameters == counted


def test_survives_json() -> None:
    """What to_json writes, from_json reads back equal."""
    scaling = RopeScaling(kind="factors", factors=(1.0, 2.5))
    plain = config_from_hf(hf())
    config = ModelConfig(**{**plain.__dict__, "rope_scaling": scaling})
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
