"""Tokenizers built from GGUF metadata: how each kind cuts text before BPE."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_common.errors import InvalidRequest
from headrace_testing.tiny_model import MERGES, SPECIAL_TOKENS, TOKENS, tiny_tokenizer
from headrace_worker.model.gguf_tokenizer import build_tokenizer


def metadata(**changes: Any) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": list(TOKENS),
        "tokenizer.ggml.token_type": [3 if t in SPECIAL_TOKENS else 1 for t in TOKENS],
        "tokenizer.ggml.merges": list(MERGES),
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }


@pytest.mark.parametrize("text", ["the ant\n12 <|im_end|>", "ÄÖ 你好 🎉", "", "  a  the"])
def test_gpt2_kind_equals_the_original(text: str) -> None:
    """Ids equal those of the tokenizer that the metadata was made from, and decode to the text."""
    built = build_tokenizer(metadata())
    ids = built.encode(text, add_special_tokens=False).ids
    assert ids == tiny_tokenizer().encode(text).ids
    assert built.decode(ids, skip_special_tokens=False) == text


def pieces(pre: str, text: str) -> list[str]:
    pre_tokenizer = build_tokenizer(metadata(pre=pre)).pre_tokenizer
    return [piece.replace("Ġ", " ") for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["he", "'s", " 12345", "!!"]),
        ("smollm", ["he", "'s", " ", "1", "2", "3", "4", "5", "!!"]),
        ("llama-bpe", ["he", "'s", " ", "123", "45", "!!"]),
        ("qwen2", ["he", "'s", " ", "1", "2", "3", "4", "5", "!!"]),
    ],
)
def test_each_kind_cuts_digits_its_own_way(pre: str, expected: list[str]) -> None:
    """Runs of digits are what the kinds differ in."""
    assert pieces(pre, "he's 12345!!") == expected


def test_llama3_takes_whole_words_from_the_vocabulary() -> None:
    """llama-bpe uses a token that no merge leads to; the others do not."""
    tokens, kinds = [*TOKENS, "xyz"], [*metadata()["tokenizer.ggml.token_type"], 1]
    for pre, count in (("llama-bpe", 1), ("gpt-2", 3)):
        built = build_tokenizer(metadata(pre=pre, tokens=tokens, token_type=kinds))
        assert len(built.encode("xyz").ids) == count


def test_qwen2_normalises() -> None:
    """qwen2 composes characters first (NFC)."""
    built = build_tokenizer(metadata(pre="qwen2"))
    assert built.encode("e\u0301").ids == built.encode("\u00e9").ids


def test_user_defined_tokens_are_whole_but_not_special() -> None:
    """A token of type 4 is found as one token in text and survives decoding without specials."""
    kinds = metadata()["tokenizer.ggml.token_type"]
    built = build_tokenizer(metadata(tokens=[*TOKENS, "<tool>"], token_type=[*kinds, 4]))
    ids = built.encode("a<tool>b<|im_end|>").ids
    assert len(TOKENS) in ids
    assert built.decode(ids, skip_special_tokens=True) == "a<tool>b"


@pytest.mark.parametrize(
    ("changes", "named"), [({"model": "t5"}, "'t5'"), ({"pre": "tekken"}, "'tekken'")]
)
def test_refuses_unknown_kinds_by_name(changes: dict[str, str], named: str) -> None:
    """A guess would give wrong ids silently, so an unknown kind is refused."""
    with pytest.raises(InvalidRequest, match=f"{named} is not supported; supported: "):
        build_tokenizer(metadata(**changes))
