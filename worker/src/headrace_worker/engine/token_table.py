"""The bytes that each token stands for, read out of tokenizer.json.

Bytes, not text, since a token may end in the middle of a character. Two families of tokenizers are
known: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) and SentencePiece pieces with byte fallback
(Llama 2, Mistral, Gemma).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>\Z")
_SENTENCEPIECE_SPACE = "\u2581"


class UnknownTokenizer(Exception):  # noqa: N818 - says what it is
    """The tokenizer turns tokens into text in a way that is not known here."""


class TokenTable:
    """Token id -> bytes.

    Args:
        pieces: bytes by id; ids without any are absent.
        special_ids: control tokens, which have a spelling but no text.
    """

    def __init__(self, pieces: Mapping[int, bytes], special_ids: frozenset[int]) -> None:
        self._pieces = pieces
        self.special_ids = special_ids

    @classmethod
    def from_json(cls, tokenizer_json: bytes) -> TokenTable:
        """Read tokenizer.json.

        Raises:
            UnknownTokenizer: neither byte-level nor SentencePiece-like.
        """
        spec = json.loads(tokenizer_json)
        to_bytes = _piece_reader(spec.get("decoder") or {})
        pieces = {token_id: to_bytes(piece) for piece, token_id in _vocabulary(spec).items()}
        special = set()
        for added in spec.get("added_tokens", ()):
            pieces[added["id"]] = added["content"].encode()
            if added["special"]:
                special.add(added["id"])
        return cls(pieces, frozenset(special))

    def spelling(self, token_id: int) -> bytes:
        """Return a token's bytes; a control token's name. Empty for an id without any."""
        return self._pieces.get(token_id, b"")

    def text_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to the text; nothing for a control token."""
        return b"" if token_id in self.special_ids else self._pieces.get(token_id, b"")


def _vocabulary(spec: dict[str, Any]) -> dict[str, int]:  # Any: JSON
    model = spec["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        return vocab
    # Unigram: a list of (piece, score) in the order of ids.
    return {piece: token_id for token_id, (piece, _) in enumerate(vocab)}


def _piece_reader(decoder: dict[str, Any]) -> Any:  # Any: JSON in, a function str -> bytes out
    kinds = {decoder.get("type")} | {part["type"] for part in decoder.get("decoders", ())}
    if "ByteLevel" in kinds:
        return _ByteLevel()
    if kinds & {"Metaspace", "ByteFallback", "Replace"}:
        return _sentencepiece
    raise UnknownTokenizer(f"tokenizer.json has the decoder {decoder.get('type')!r}")


class _ByteLevel:
    """Undoes GPT-2's map from bytes to printable characters (openai/gpt-2, src/encoder.py)."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(256) if byte not in printable]
        chars = {chr(byte): byte for byte in printable}
        chars.update((chr(256 + idx), byte) for idx, byte in enumerate(hidden))
        # Whole pieces at a time, as there are 50,000 to 260,000 while a worker's start waits.
        self._latin = str.maketrans({char: chr(byte) for char, byte in chars.items()})
        self._known = re.compile("[" + re.escape("".join(chars)) + "]*")

    def __call__(self, piece: str) -> bytes:
        if self._known.fullmatch(piece):
            return piece.translate(self._latin).encode("latin-1")
        return piece.encode()


def _sentencepiece(piece: str) -> bytes:
    match = _BYTE_PIECE.match(piece)
    if match:
        return bytes([int(match[1], 16)])
    return piece.replace(_SENTENCEPIECE_SPACE, " ").encode()
