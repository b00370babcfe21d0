"""A model's own tokenizer, made so that only templates write its control tokens (`prompt`)."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer


def with_control_tokens(tokenizer_json: bytes, template: str) -> dict[str, Any]:
    """Mark every control token as special, and let none of them match a normalised text."""
    spec = json.loads(tokenizer_json)
    for token in spec.get("added_tokens", ()):
        spelling = token["content"]
        is_quoted = spelling.startswith(("<", "[")) and spelling.endswith((">", "]"))
        looks_so = spelling.startswith("<|") and spelling.endswith("|>")
        if token["special"] or looks_so or (is_quoted and spelling in template):
            token["special"], token["normalized"] = True, False
    return dict(spec)


def spare_first_prefix(spec: dict[str, Any]) -> bool:
    """Let no text get the space that only a text's beginning gets; whether any would have."""
    outer = spec.get("pre_tokenizer") or {}
    found = False
    for step in (outer, *outer.get("pretokenizers", ())):
        if step.get("prepend_scheme") == "first":
            step["prepend_scheme"], found = "never", True
    return found


def make_tokenizer(spec: dict[str, Any]) -> Tokenizer:
    """Return a tokenizer to which control tokens' spellings are text."""
    made = Tokenizer.from_str(json.dumps(spec, ensure_ascii=False))
    made.encode_special_tokens = True
    made.no_padding()
    made.no_truncation()
    return made


def encode_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode one text, as a batch of one: that call computes no offsets, and lets threads run."""
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids
