"""What the rest of the worker, and through its model card the gateway, needs to know of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from headrace_worker.sampling_defaults import SamplingDefaults


@dataclass(frozen=True)
class ModelInfo:
    """Identity, limits and texts of a loaded model.

    Attributes:
        fingerprint: sha256 (hex) over the identity of the weights and the tokenizer; two workers
            with the same files have the same one.
        context_tokens: prompt and output together.
        vocab_size: width of a row of logits.
        chat_template: Jinja text; empty = the model has none.
        eos_token_ids: ids that end an answer.
        bos_token_id: None = the model has none.
        add_bos: raw prompts begin with it. The tokenizer is to be called without adding special
            tokens; whoever encodes prepends this id.
        tokenizer_json: bytes of tokenizer.json.
        special_tokens: spellings as the template writes them, by name ("bos_token", ...).
        kv_bytes_per_token: KV memory per token over all layers.
        created_unix_s: when the weights were written.
        sampling_defaults: what the model's files and makers recommend.
    """

    fingerprint: str
    context_tokens: int
    vocab_size: int
    chat_template: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos: bool
    tokenizer_json: bytes
    special_tokens: Mapping[str, str]
    kv_bytes_per_token: int
    created_unix_s: int
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)

    @cached_property
    def tokenizer_sha256(self) -> str:
        """Sha256 of tokenizer.json, hex."""
        return hashlib.sha256(self.tokenizer_json).hexdigest()
