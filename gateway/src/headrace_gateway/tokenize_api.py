"""/tokenize and /detokenize, in vLLM's shapes: what a prompt is to a model, and back.

No model sees the text, so nothing is billed and the guard is not asked; a key's limit of requests
counts it.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import orjson
from msgspec import Meta, Struct

from headrace_common.errors import InvalidRequest
from headrace_gateway.admission import Admission
from headrace_gateway.api_request import ApiRequest
from headrace_gateway.intake import Intake
from headrace_gateway.json_body import decode
from headrace_gateway.model_directory import ServedModel
from headrace_gateway.model_routes.model_names import ModelNames
from headrace_gateway.openai_bodies import (
    ChatBody,
    CustomToolBody,
    FunctionToolBody,
    MessageBody,
    Token,
)
from headrace_gateway.openai_schema import read_chat
from headrace_gateway.principal import Principal
from headrace_gateway.visit import Caller

Name = Annotated[str, Meta(min_length=1, max_length=256)]


class TokenizeBody(Struct, forbid_unknown_fields=True):
    """POST /tokenize: a prompt or messages. Any: JSON values."""

    model: Name
    prompt: str | None = None
    messages: list[MessageBody] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: list[FunctionToolBody | CustomToolBody] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Struct, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: Name
    tokens: list[Token]


_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)


class TokenizeApi:
    """Answers both endpoints.

    Args:
        names: finds the tokenizer.
        intake: encodes and decodes, off the loop what is long.
        admission: checks the key's limits.
    """

    def __init__(self, names: ModelNames, intake: Intake, admission: Admission) -> None:
        self._names, self._intake, self._admission = names, intake, admission

    async def tokenize(self, caller: Caller, body: bytes) -> bytes:
        """Return ids and their number."""
        asked = decode(_TOKENIZE, body)
        model = await self._model(caller, asked.model)
        request = None if asked.messages is None else _conversation(asked)
        if (asked.prompt is None) == (request is None):
            raise InvalidRequest("Give either prompt or messages.", param="prompt")
        _check_beside(asked)
        async with self._admission.one_request(caller):
            ids = await self._ids(caller.principal, model, request, asked)
        said: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": model.card.context_tokens,
            "tokens": ids,
        }
        if asked.return_token_strs:
            said["token_strs"] = model.encoder.spellings(ids)
        return orjson.dumps(said)

    async def detokenize(self, caller: Caller, body: bytes) -> bytes:
        """Return the text of ids, control tokens spelled out."""
        asked = decode(_DETOKENIZE, body)
        model = await self._model(caller, asked.model)
        if max(asked.tokens, default=0) >= model.card.vocab_size:
            raise InvalidRequest(
                "tokens holds an id that this model does not have.", param="tokens"
            )
        async with self._admission.one_request(caller):
            text = await self._intake.run(
                caller.principal, len(asked.tokens), lambda: model.encoder.decode(asked.tokens)
            )
        return orjson.dumps({"prompt": text})

    async def _model(self, caller: Caller, name: str) -> ServedModel:
        model = await self._names.find(name, caller.principal)
        if model.card.takes_text:
            raise InvalidRequest("This model's tokens are not known here.", param="model")
        return model

    async def _ids(
        self,
        principal: Principal,
        model: ServedModel,
        request: ApiRequest | None,
        asked: TokenizeBody,
    ) -> list[int]:
        if request is not None:
            (ids,) = await self._intake.token_ids(principal, request, model.encoder)
            return ids.listed()
        text, add_bos = asked.prompt or "", asked.add_special_tokens is not False
        encoded = await self._intake.run(
            principal, len(text), lambda: model.encoder.encode_text(text, add_bos=add_bos)
        )
        return encoded.listed()


# Fields that mean something beside a prompt only, or beside messages only.
_OF_PROMPTS = ("add_special_tokens",)
_OF_MESSAGES = ("tools", "chat_template_kwargs")


def _check_beside(asked: TokenizeBody) -> None:
    """Refuse what would be passed over in silence."""
    names, why = (_OF_MESSAGES, "messages") if asked.messages is None else (_OF_PROMPTS, "prompt")
    for name in names:
        if getattr(asked, name) is not None:
            raise InvalidRequest(f"{name} needs {why}.", param=name)


def _conversation(asked: TokenizeBody) -> ApiRequest:
    return read_chat(
        ChatBody(
            model=asked.model,
            messages=asked.messages or [],
            tools=asked.tools,
            chat_template_kwargs=asked.chat_template_kwargs,
        )
    )
