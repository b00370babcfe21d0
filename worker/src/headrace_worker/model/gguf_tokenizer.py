"""tokenizer.json out of a GGUF file's metadata.

Two kinds of ``tokenizer.ggml.model`` are known. "gpt2" is byte-level BPE: how text is cut before
BPE is known by the name in ``tokenizer.ggml.pre``; the patterns are those of the models' own
tokenizer.json files (llama.cpp lists them in its ``llama-vocab.cpp``). "llama" is SentencePiece's
BPE: pieces have scores, and of two neighbours those are joined first whose joint piece has the
highest (SentencePiece, ``bpe_model.cc``); what no piece covers becomes bytes. The result adds no
special tokens of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from headrace_common.errors import InvalidRequest

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
# Kinds of pieces that others may be joined of.
_JOINED = (_NORMAL, _USER_DEFINED)
_SPACE = "\u2581"
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes.

    Raises:
        InvalidRequest: a tokenizer model or a pre-tokenizer that is not known here.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "llama":
        return _sentencepiece(metadata)
    if kind != "gpt2":
        raise InvalidRequest(
            f"GGUF tokenizer model {kind!r} is not supported; supported: 'gpt2', 'llama'"
        )
    return _byte_level_bpe(metadata)


def _byte_level_bpe(metadata: Mapping[str, Any]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise InvalidRequest(f"GGUF pre-tokenizer {pre!r} is not supported; supported: {known}")
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=[_pair(merge) for merge in metadata["tokenizer.ggml.merges"]],
            fuse_unk=False,
            # Llama 3 takes a whole word that is in the vocabulary even where no merge leads to it.
            ignore_merges=pre == "llama-bpe",
        )
    )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    _add(tokenizer, tokens, kinds)
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=_merges(tokens, kinds, metadata["tokenizer.ggml.scores"]),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    # SentencePiece's default, which Gemma turns off. As in llama.cpp, text behind a piece that is
    # taken whole begins anew.
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    to_pieces = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*to_pieces, normalizers.Replace(" ", _SPACE)])
    to_text = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    without_prefix = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence([*to_text, *without_prefix])
    _add(tokenizer, tokens, kinds)
    return tokenizer


def _merges(tokens: list[str], kinds: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """List the pairs that make up each piece, best score first."""
    usable = {token for token, kind in zip(tokens, kinds, strict=True) if kind in _JOINED}
    ranked = [
        (-score, len(left), left, piece[len(left) :])
        for piece, kind, score in zip(tokens, kinds, scores, strict=True)
        if kind == _NORMAL
        for left in (piece[:cut] for cut in range(1, len(piece)))
        if left in usable and piece[len(left) :] in usable
    ]
    ranked.sort()
    return [(left, right) for _, _, left, right in ranked]


def _add(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    def of_kind(wanted: int, *, special: bool) -> list[AddedToken]:
        return [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == wanted
        ]

    tokenizer.add_special_tokens(of_kind(_CONTROL, special=True))
    tokenizer.add_tokens(of_kind(_USER_DEFINED, special=False))


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _byte_level(*, use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split_then_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, _byte_level(use_regex=False)])


def _digits_then_bytes() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, _byte_level(use_regex=True)])


_PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: _byte_level(use_regex=True),
    "smollm": _digits_then_bytes,
    "llama-bpe": lambda: _split_then_bytes(_LLAMA3_PATTERN),
    "qwen2": lambda: _split_then_bytes(_QWEN2_PATTERN),
}
