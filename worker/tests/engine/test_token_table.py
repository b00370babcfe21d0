"""Token table: the bytes of every token equal what the tokenizer itself decodes."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models

from headrace_testing import byte_tokenizer
from headrace_worker.engine.token_table import TokenTable, UnknownTokenizer


def test_byte_level_tokens_are_their_bytes():
    """In the byte tokenizer an id is its byte."""
    table = TokenTable.from_json(byte_tokenizer.tokenizer_json())
    assert all(table.text_bytes(byte) == bytes([byte]) for byte in range(256))


def test_control_tokens_have_a_name_but_no_text():
    """Control tokens never reach the text."""
    table = TokenTable.from_json(byte_tokenizer.tokenizer_json())
    assert table.text_bytes(byte_tokenizer.IM_END_ID) == b""
    assert table.spelling(byte_tokenizer.IM_END_ID) == b"<|im_end|>"


def test_sentencepiece_pieces_and_byte_fallback():
    """The low line is a space, <0xNN> is a byte, an unknown id is nothing."""
    vocab = {"<unk>": 0, "<0xC3>": 1, "<0xA9>": 2, "\u2581caf": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    table = TokenTable.from_json(tokenizer.to_str().encode())
    assert b"".join(map(table.text_bytes, [3, 1, 2, 77])).decode() == " café"


def test_an_unknown_decoder_is_refused():
    """Better no start than wrong text."""
    spec = {"model": {"vocab": {}}, "decoder": {"type": "WordPiece"}}
    with pytest.raises(UnknownTokenizer, match="WordPiece"):
        TokenTable.from_json(json.dumps(spec).encode())
