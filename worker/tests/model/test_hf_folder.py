"""Hugging Face folders: shards, other types, texts, and what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, processors

from headrace_common.errors import InvalidRequest
from headrace_testing.tiny_model import CHAT_TEMPLATE, TOKENS, TinyShape, write_hf_folder
from headrace_worker.model.hf_folder import load_hf_folder


def test_shards_equal_one_file(tmp_path: Path) -> None:
    """A checkpoint in three shards loads the same weights as in one file."""
    write_hf_folder(tmp_path / "one")
    write_hf_folder(tmp_path / "three", num_shards=3)
    one, three = load_hf_folder(tmp_path / "one"), load_hf_folder(tmp_path / "three")
    for left, right in zip(one.weights.layers, three.weights.layers, strict=True):
        for name, value in left.__dict__.items():
            assert value is None or torch.equal(value, getattr(right, name)), name
    assert one.info.fingerprint != three.info.fingerprint


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_become_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    """Half precision weights are widened, in their exact values, query over key over value."""
    weights = write_hf_folder(tmp_path, dtype=dtype)
    qkv = load_hf_folder(tmp_path).weights.layers[0].qkv
    parts = [weights[f"model.layers.0.self_attn.{p}_proj.weight"] for p in "qkv"]
    assert qkv.dtype == torch.float32
    assert torch.equal(qkv, torch.cat(parts))


def test_head_is_tied_or_its_own(tmp_path: Path) -> None:
    """A tied head is the embedding itself, no copy; an untied one is read."""
    write_hf_folder(tmp_path / "tied")
    own = write_hf_folder(tmp_path / "own", TinyShape(is_head_tied=False))
    tied = load_hf_folder(tmp_path / "tied").weights
    assert tied.head is tied.embedding
    head = load_hf_folder(tmp_path / "own").weights.head
    assert torch.equal(head, own["lm_head.weight"])


def test_info_tells_limits_texts_and_ids(tmp_path: Path) -> None:
    """The model card's facts come from the folder's files; generation_config.json wins on ends."""
    write_hf_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    info = load_hf_folder(tmp_path).info
    assert (info.context_tokens, info.vocab_size) == (256, len(TOKENS))
    assert (info.eos_token_ids, info.bos_token_id, info.add_bos) == ((2, 0), 1, False)
    assert info.chat_template == CHAT_TEMPLATE
    assert info.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert info.tokenizer_json == (tmp_path / "tokenizer.json").read_bytes()


def test_template_file_wins_over_the_config(tmp_path: Path) -> None:
    """chat_template.jinja beside the config is the newer form; a list has a default."""
    write_hf_folder(tmp_path)
    named = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_hf_folder(tmp_path).info.chat_template == "d"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load_hf_folder(tmp_path).info.chat_template == "from the file"


def test_notices_a_tokenizer_that_prepends_bos(tmp_path: Path) -> None:
    """add_bos is what the tokenizer does, since callers encode without its special tokens."""
    write_hf_folder(tmp_path)
    path = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    tokenizer.save(str(path))
    assert load_hf_folder(tmp_path).info.add_bos


def test_fingerprint_follows_files(tmp_path: Path) -> None:
    """Equal folders have equal fingerprints; another tokenizer or config gives another one."""
    write_hf_folder(tmp_path / "a")
    write_hf_folder(tmp_path / "b")
    first = load_hf_folder(tmp_path / "a").info
    assert load_hf_folder(tmp_path / "b").info.fingerprint == first.fingerprint
    path = tmp_path / "b" / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    changed = load_hf_folder(tmp_path / "b").info
    assert changed.fingerprint != first.fingerprint
    assert changed.tokenizer_sha256 != first.tokenizer_sha256
    write_hf_folder(tmp_path / "c", TinyShape(rope_theta=9.0))
    assert load_hf_folder(tmp_path / "c").info.fingerprint != first.fingerprint


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_names_a_missing_file(tmp_path: Path, name: str) -> None:
    """A folder without one of its files is refused, and the message says which."""
    write_hf_folder(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(InvalidRequest, match=f"lacks {name}"):
        load_hf_folder(tmp_path)


def test_names_a_missing_tensor(tmp_path: Path) -> None:
    """A checkpoint with fewer layers than its config is refused with the first missing name."""
    write_hf_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(InvalidRequest, match=r"lacks 9 tensors, first 'model\.layers\.2\."):
        load_hf_folder(tmp_path)
