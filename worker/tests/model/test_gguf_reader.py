"""GGUF files, written as llama.cpp's converter writes them, read back."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from headrace_common.errors import InvalidRequest
from headrace_testing.tiny_model import CHAT_TEMPLATE, TinyShape, tiny_weights, write_gguf
from headrace_worker.model.gguf_config import config_from_gguf
from headrace_worker.model.gguf_reader import GgufFile

Q = gguf.GGMLQuantizationType


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1])
def test_reads_every_tensor_dequantised_in_half_split_order(tmp_path: Path, kind: Q) -> None:
    """All tensors come back under their HF names, dequantised, query and key rows un-permuted."""
    # Rows must be whole quantisation blocks of 32.
    shape = TinyShape(hidden_size=64, ffn_size=96)
    expected = write_gguf(tmp_path / "m.gguf", shape, quantization=kind)
    file = GgufFile(tmp_path / "m.gguf")
    for name, values in expected.items():
        assert file.shape(name) == tuple(values.shape), name
        np.testing.assert_array_equal(file.tensor(name), values.numpy(), err_msg=name)
    original = tiny_weights(shape)["model.layers.1.self_attn.q_proj.weight"]
    read = torch.from_numpy(file.tensor("model.layers.1.self_attn.q_proj.weight"))
    assert (read - original).abs().max() < 0.1


def test_reads_shape_ids_and_texts(tmp_path: Path) -> None:
    """Config, special tokens and chat template come from the metadata."""
    write_gguf(tmp_path / "m.gguf", TinyShape(is_head_tied=False, rope_theta=5e4))
    file = GgufFile(tmp_path / "m.gguf")
    config = file.config
    assert (config.num_layers, config.hidden_size, config.ffn_size) == (2, 64, 96)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.context_tokens, config.rope_theta, config.is_head_tied) == (256, 5e4, False)
    assert (config.eos_token_ids, config.bos_token_id, config.add_bos) == ((2,), 1, False)
    assert file.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert file.chat_template == CHAT_TEMPLATE


def test_refuses_an_unknown_architecture_by_name(tmp_path: Path) -> None:
    """The message names the architecture found and those supported."""
    write_gguf(tmp_path / "m.gguf", metadata={"general.architecture": "mamba"})
    with pytest.raises(InvalidRequest, match="'mamba' is not supported; supported: llama"):
        GgufFile(tmp_path / "m.gguf")


def test_refuses_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    """Any other file is named as such."""
    (tmp_path / "m.gguf").write_bytes(b"something else entirely" * 20)
    with pytest.raises(InvalidRequest, match="not a readable GGUF"):
        GgufFile(tmp_path / "m.gguf")


def test_names_a_missing_tensor(tmp_path: Path) -> None:
    """A tensor that is not there is named as the file would have named it."""
    write_gguf(tmp_path / "m.gguf")
    with pytest.raises(InvalidRequest, match=r"'output\.weight'"):
        GgufFile(tmp_path / "m.gguf").tensor("lm_head.weight")


def test_names_a_missing_key() -> None:
    """A file without one of its sizes is refused, and the message says which key."""
    with pytest.raises(InvalidRequest, match=r"'llama\.attention\.head_count'"):
        config_from_gguf({"general.architecture": "llama"}, is_head_tied=True)
