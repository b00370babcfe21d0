"""/v1/messages/count_tokens: how long a request's prompt would be."""

from __future__ import annotations

import orjson

from headrace_gateway.api_request import Endpoint
from headrace_gateway.auth import check_model_allowed
from headrace_gateway.intake import Intake
from headrace_gateway.messages_api.dialect import MessagesDialect, check_version
from headrace_gateway.messages_api.schema import parse_count
from headrace_gateway.model_directory import ModelDirectory
from headrace_gateway.visit import Caller


class CountDialect(MessagesDialect):
    """The errors of /v1/messages, counted apart."""

    endpoint = Endpoint.COUNT_TOKENS


class TokenCount:
    """Counts. No model sees the prompt, so nothing is billed and the guard is not asked.

    Args:
        directory: finds the tokenizer.
        intake: encodes as for an answer.
    """

    def __init__(self, directory: ModelDirectory, intake: Intake) -> None:
        self._directory, self._intake = directory, intake

    async def __call__(self, caller: Caller, body: bytes) -> bytes:
        """Return the count as JSON."""
        check_version(caller.exchange)
        request = parse_count(body)
        model = self._directory.get(request.model)
        check_model_allowed(caller.principal, request.model)
        prompts = await self._intake.encode(request, model, caller.principal)
        return orjson.dumps({"input_tokens": sum(len(it.token_ids) for it in prompts)})
