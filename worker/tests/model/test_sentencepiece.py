"""SentencePiece tokenizers of GGUF files against the algorithm written down plainly."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from headrace_worker.engine.token_table import TokenTable
from headrace_worker.model.gguf_tokenizer import build_tokenizer

SPACE = "\u2581"
_NORMAL, _UNKNOWN, _CONTROL, _USER, _BYTE = 1, 2, 3, 4, 6
# Scores fall as a trainer's do: the earlier a piece was made, the higher.
_PIECES = ["ab", "bc", SPACE + "a", "abc", "ca", SPACE + "ab", "cab", "aa", SPACE * 2, "bcab"]
_LETTERS = ["a", "b", "c", SPACE]


def metadata(*, has_prefix: bool) -> dict[str, Any]:
    special = [("<unk>", _UNKNOWN, 0.0), ("<s>", _CONTROL, 0.0), ("</s>", _CONTROL, 0.0)]
    bytes_ = [(f"<0x{value:02X}>", _BYTE, 0.0) for value in range(256)]
    user = [("<b>", _USER, -1000.0)]
    normal = [(piece, _NORMAL, -float(idx)) for idx, piece in enumerate([*_PIECES, *_LETTERS])]
    tokens, kinds, scores = zip(*special, *bytes_, *user, *normal, strict=True)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": list(kinds),
        "tokenizer.ggml.scores": list(scores),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": has_prefix,
    }


def joined(text: str, scores: dict[str, float]) -> list[str]:
    """Join the neighbours of the best score, leftmost first, until none can be joined."""
    pieces = list(text)
    while True:
        pairs = [
            (-scores[left + right], place)
            for place, (left, right) in enumerate(pairwise(pieces))
            if left + right in scores
        ]
        if not pairs:
            return pieces
        _, place = min(pairs)
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "no prefix"])
def tokenizer(request: pytest.FixtureRequest) -> tuple[Tokenizer, bool]:
    return build_tokenizer(metadata(has_prefix=request.param)), request.param


@given(text=st.text(alphabet="abc d", max_size=24))
def test_pieces_are_those_of_the_plain_algorithm(
    tokenizer: tuple[Tokenizer, bool], text: str
) -> None:
    """Best score first, leftmost among equals; a letter that no piece covers becomes its bytes."""
    built, has_prefix = tokenizer
    values = metadata(has_prefix=has_prefix)
    scores = {
        token: score
        for token, kind, score in zip(
            values["tokenizer.ggml.tokens"],
            values["tokenizer.ggml.token_type"],
            values["tokenizer.ggml.scores"],
            strict=True,
        )
        if kind == _NORMAL
    }
    prepared = (SPACE if has_prefix and text else "") + text.replace(" ", SPACE)
    expected = ["<0x64>" if piece == "d" else piece for piece in joined(prepared, scores)]
    encoding = built.encode(text, add_special_tokens=False)
    assert encoding.tokens == expected
    assert built.decode(encoding.ids) == text


def test_special_and_user_defined_pieces_are_taken_whole(
    tokenizer: tuple[Tokenizer, bool],
) -> None:
    """A user-defined piece is found before anything is joined and stays text."""
    built, has_prefix = tokenizer
    encoding = built.encode("a<b>\u00e9", add_special_tokens=False)
    assert "<b>" in encoding.tokens
    assert encoding.tokens[-2:] == ["<0xC3>", "<0xA9>"]
    table = TokenTable.from_json(built.to_str().encode())
    expected = " a<b> \u00e9" if has_prefix else "a<b>\u00e9"
    assert b"".join(map(table.text_bytes, encoding.ids)) == expected.encode()
