"""/v1/responses: bodies in, answers and errors out."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

import orjson

from headrace_common.clock import Clock
from headrace_common.errors import HeadraceError
from headrace_gateway import error_body
from headrace_gateway.answer import Sink
from headrace_gateway.answer_extras import Json
from headrace_gateway.api_request import ApiRequest, Endpoint
from headrace_gateway.event_stream import named_event
from headrace_gateway.model_directory import ServedModel
from headrace_gateway.model_routes.model_names import ModelNames
from headrace_gateway.openai_dialect import check_tier
from headrace_gateway.responses_api.background import BackgroundResponses
from headrace_gateway.responses_api.event_log import EventLog, event_of
from headrace_gateway.responses_api.kept import Claimed, KeptResponses, Work
from headrace_gateway.responses_api.schema import Asked, echo, parse, read
from headrace_gateway.responses_api.sink import OnEnd, ResponseSink, fresh_response
from headrace_gateway.state.store import Owner, once_there
from headrace_gateway.visit import Caller, Reading, Visit

_log = logging.getLogger(__name__)


class ResponsesDialect:
    """How /v1/responses is spoken.

    Args:
        kept: responses that came before, and where new ones are kept.
        background: makes those that nobody waits for.
        names: to tell of a queued response how its model will sample.
        clock: time.
    """

    endpoint = Endpoint.RESPONSES
    id_headers = (b"x-request-id",)
    query_params: tuple[str, ...] = ()

    def __init__(
        self,
        kept: KeptResponses,
        background: BackgroundResponses,
        names: ModelNames,
        clock: Clock,
    ) -> None:
        self._kept, self._background = kept, background
        self._names, self._clock = names, clock

    async def read(self, body: bytes, caller: Caller) -> Reading:
        """Parse a body, together with the conversation that it continues.

        Raises:
            InvalidRequest: it is wrong.
            NotFound: an earlier response is not there.
        """
        asked = parse(body)
        earlier = await self._kept.earlier(Owner.of(caller.principal), asked.previous_id)
        work = _Work(asked, caller, self._kept, self._clock)
        request = read(asked, earlier)
        check_tier(request, caller.principal)
        if not asked.body.background:
            return Reading(request, work.make_sink, end_failed=work.end_failed)
        with suppress(HeadraceError):  # it is refused later, or sampled by another
            work.note_sampling(await self._names.find(request.model, caller.principal), request)

        async def detach(visit: Visit) -> bytes | AsyncIterator[bytes]:
            wanted = Work(caller.principal.key_id, body)
            queued = await self._background.start(visit, work.response, work.items, wanted)
            if not request.streaming.is_stream:
                return orjson.dumps(queued)
            find = partial(self._kept.find, Owner.of(caller.principal), queued["id"])
            return self._background.follow(find, queued["id"], 0)

        return Reading(request, work.make_sink, detach)

    async def read_again(self, claimed: Claimed, caller: Caller) -> Reading:
        """Parse the body of a background response that another process began.

        Raises:
            InvalidRequest: it cannot be gone on with any more.
        """
        asked = parse(claimed.work.request)
        earlier = await self._kept.earlier(Owner.of(caller.principal), asked.previous_id)
        work = _Work(asked, caller, self._kept, self._clock, claimed)
        request = read(asked, earlier)
        check_tier(request, caller.principal)
        return Reading(request, work.make_sink)

    def error_body(self, error: HeadraceError, request_id: str) -> bytes:
        """Return the JSON of an error."""
        return error_body.render(error, request_id)

    def error_event(self, body: bytes, num_events: int) -> bytes:
        """Return the error as the last event."""
        told = orjson.loads(body)["error"]
        data = {
            "type": "error",
            "code": told["code"],
            "message": told["message"],
            "param": told["param"],
            "sequence_number": num_events,
        }
        return named_event("error", orjson.dumps(data))


class _Work:
    """One response being made."""

    def __init__(
        self,
        asked: Asked,
        caller: Caller,
        kept: KeptResponses,
        clock: Clock,
        claimed: Claimed | None = None,
    ) -> None:
        self._asked, self._kept = asked, kept
        # Not the caller: its exchange knows how a failed response ends, and so this.
        self._owner, self._request_id = Owner.of(caller.principal), caller.request_id
        serial = caller.request_id.removeprefix("req_")
        if claimed is None:
            now_s = int(clock.unix_s())
            self.response = fresh_response(f"resp_{serial}", asked.body.model, now_s, echo(asked))
        else:
            self.response = claimed.response
        self.items = [
            {
                "id": f"{_PREFIXES.get(item['type'], 'item_')}{serial}i{idx}",
                "status": "completed",
                **{name: value for name, value in _in_parts(item).items() if value is not None},
            }
            for idx, item in enumerate(asked.items)
        ]

    def note_sampling(self, model: ServedModel, request: ApiRequest) -> None:
        """Tell what a model samples this request with."""
        self.response.update(model.card.sampling_defaults.echo(request.named_sampling))

    def make_sink(self, visit: Visit, model: ServedModel, clock: Clock) -> Sink:
        """Return where the answer goes."""
        self.response["model"] = model.card.model
        self.note_sampling(model, visit.request)
        on_end: OnEnd = self._keep
        if isinstance(visit.exchange, EventLog):
            on_end = partial(self._finish, visit.exchange)
        return ResponseSink(
            visit.exchange,
            self.response,
            clock,
            on_end,
            self._asked.tools,
            is_stream=visit.request.streaming.is_stream,
        )

    async def end_failed(self, body: bytes, num_events: int) -> bytes:
        """Keep the response as failed and return the event that says so."""
        told = orjson.loads(body)["error"]
        error = {"code": told["code"], "message": told["message"]}
        self.response.update(status="failed", completed_at=None, error=error)
        return event_of("response.failed", await self._keep(self.response), num_events)

    async def _keep(self, response: Json) -> Json:
        if self._asked.is_stored:
            try:
                await self._kept.keep(self._owner, response, self.items, self._request_id)
            except HeadraceError as error:
                # It is made and paid for: better told as not kept than not told.
                _log.warning("%s cannot be kept: %s", response["id"], error)
                return {**response, "store": False}
        return response

    async def _finish(self, log: EventLog, response: Json) -> Json:
        await once_there(lambda: self._kept.finish(response, log.attempt))
        return response


def _in_parts(item: Json) -> Json:
    """Return an item with its content as parts, as items are listed; a text may be given bare."""
    text = item.get("content")
    if item["type"] != "message" or not isinstance(text, str):
        return item
    part: Json = {"type": "input_text", "text": text}
    if item["role"] == "assistant":
        part = {"type": "output_text", "text": text, "annotations": []}
    return {**item, "content": [part]}


_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
}
