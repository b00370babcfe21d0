"""/v1/responses/input_tokens: how long a response's prompt would be."""

from __future__ import annotations

import orjson

from headrace_gateway.admission import Admission
from headrace_gateway.intake import Intake
from headrace_gateway.json_body import decode
from headrace_gateway.model_routes.model_names import ModelNames
from headrace_gateway.responses_api.bodies import COUNT_DECODER
from headrace_gateway.responses_api.kept import KeptResponses
from headrace_gateway.responses_api.schema import parse, read
from headrace_gateway.state.store import Owner
from headrace_gateway.visit import Caller


class InputTokenCount:
    """Counts. No model sees the prompt, so nothing is billed and the guard is not asked.

    Args:
        kept: responses that came before.
        names: finds the tokenizer.
        intake: encodes as for an answer, but for what does not fit.
        admission: checks the key's limits.
    """

    def __init__(
        self, kept: KeptResponses, names: ModelNames, intake: Intake, admission: Admission
    ) -> None:
        self._kept, self._names = kept, names
        self._intake, self._admission = intake, admission

    async def __call__(self, caller: Caller, body: bytes) -> bytes:
        """Return the count as JSON."""
        # Nothing but what a prompt is made of; then read as a response's body, which has more.
        decode(COUNT_DECODER, body)
        asked = parse(body)
        async with self._admission.one_request(caller):
            earlier = await self._kept.earlier(Owner.of(caller.principal), asked.previous_id)
            request = read(asked, earlier)
            model = await self._names.find(request.model, caller.principal)
            (ids,) = await self._intake.token_ids(caller.principal, request, model.encoder)
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": len(ids)})
