"""/v1/messages/count_tokens: how long a request's prompt would be."""

from __future__ import annotations

import orjson

from headrace_gateway.admission import Admission
from headrace_gateway.api_request import Endpoint
from headrace_gateway.intake import Intake
from headrace_gateway.messages_api.dialect import MessagesDialect, check_version
from headrace_gateway.messages_api.schema import parse_count
from headrace_gateway.model_routes.model_names import ModelNames
from headrace_gateway.visit import Caller


class CountDialect(MessagesDialect):
    """The errors of /v1/messages, counted apart."""

    endpoint = Endpoint.COUNT_TOKENS


class TokenCount:
    """Counts. No model sees the prompt, so nothing is billed and the guard is not asked.

    Args:
        names: finds the tokenizer.
        intake: encodes as for an answer, but for what does not fit.
        admission: checks the key's limits.
    """

    def __init__(self, names: ModelNames, intake: Intake, admission: Admission) -> None:
        self._names, self._intake, self._admission = names, intake, admission

    async def __call__(self, caller: Caller, body: bytes) -> bytes:
        """Return the count as JSON."""
        check_version(caller.exchange)
        request = parse_count(body)
        model = await self._names.find(request.model, caller.principal)
        async with self._admission.one_request(caller):
            (ids,) = await self._intake.token_ids(caller.principal, request, model.encoder)
        return orjson.dumps({"input_tokens": len(ids)})
