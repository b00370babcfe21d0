"""Prompts for engines that render and tokenise by themselves: their text, its length a guess.

The guess is four bytes of text to a token. Each such group stands for an id of its own, so that
blocks of ids are hashed as for any model and the router finds shared beginnings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace_common.errors import InvalidRequest
from headrace_contracts.worker.v1.worker_pb2 import TextPrompt
from headrace_gateway.api_request import ApiRequest, Message
from headrace_gateway.token_ids import TokenIds

_BYTES_PER_TOKEN = 4


class TextEncoder:
    """Stands where a model's own encoder would."""

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        args: Mapping[str, Any] | None = None,
        owner: bytes | None = None,
    ) -> TokenIds:
        """Return groups of bytes for a conversation: what comes first in most templates first."""
        del owner  # nothing is worth remembering
        return _groups(_json([list(tools), dict(args or {})]) + _json(list(messages))[1:-1])

    def encode_text(self, text: str, *, add_bos: bool = True) -> TokenIds:
        """Return groups of bytes for a plain prompt."""
        return _groups(text)

    def spellings(self, token_ids: Sequence[int]) -> list[str]:
        """Nobody but the engine knows them."""
        raise _unknown_tokens("model")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Nobody but the engine can."""
        raise _unknown_tokens("prompt")


def text_prompt(request: ApiRequest, prompt_idx: int, estimated_tokens: int) -> TextPrompt:
    """Return one of a request's prompts as it goes to the engine.

    Raises:
        InvalidRequest: it is made of ids, or ids are wanted back.
    """
    if request.shown.token_ids:
        raise _unknown_tokens("return_token_ids")
    named = request.named_sampling.to_values()
    text = TextPrompt(estimated_tokens=estimated_tokens, named_sampling=named)
    if not request.endpoint.is_conversation:
        prompt = request.prompts[prompt_idx]
        if not isinstance(prompt, str):
            raise _unknown_tokens("prompt")
        text.prompt = prompt
        return text
    text.messages_json = _json(request.messages)
    if request.tools is not None and request.tools.is_offered:
        text.tools_json = _json(request.tools.functions)
    if request.template_args:
        text.template_args_json = _json(request.template_args)
    return text


def _unknown_tokens(param: str) -> InvalidRequest:
    return InvalidRequest("This model's tokens are not known here; send text.", param=param)


def _groups(text: str) -> TokenIds:
    data = text.encode("utf-8", "replace")
    padded = data + bytes(-len(data) % _BYTES_PER_TOKEN)
    return TokenIds.of(memoryview(padded).cast("I").tolist())


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
