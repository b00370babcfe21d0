"""Chat and text completions as OpenAI's SDKs speak them."""

from __future__ import annotations

from collections.abc import Callable

from headrace_common.clock import Clock
from headrace_common.errors import HeadraceError, InvalidRequest
from headrace_contracts.types.v1.types_pb2 import PRIORITY_HIGH
from headrace_gateway import error_body
from headrace_gateway.answer import Sink, total_usage
from headrace_gateway.answer_extras import AnswerExtras
from headrace_gateway.answer_format import (
    AnswerFormat,
    AnswerHead,
    ChatFormat,
    CompletionFormat,
    event,
)
from headrace_gateway.api_request import ApiRequest, Endpoint, ServiceTier
from headrace_gateway.model_directory import ServedModel
from headrace_gateway.principal import Principal
from headrace_gateway.sse import DONE, StreamedAnswer
from headrace_gateway.visit import Caller, Reading, Visit
from headrace_gateway.whole_answer import WholeAnswer


class OpenAiErrors:
    """Errors in OpenAI's shape.

    Args:
        endpoint: whose.
    """

    id_headers = (b"x-request-id",)
    query_params: tuple[str, ...] = ()

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    def error_body(self, error: HeadraceError, request_id: str) -> bytes:
        """Return the JSON of an error."""
        return error_body.render(error, request_id)

    def error_event(self, body: bytes, num_events: int) -> bytes:
        """Return the error as an event, then the end mark."""
        return event(body) + DONE


class OpenAiDialect(OpenAiErrors):
    """One of the two endpoints that generate.

    Args:
        endpoint: which.
        parse: its body's parser.
    """

    def __init__(self, endpoint: Endpoint, parse: Callable[[bytes], ApiRequest]) -> None:
        super().__init__(endpoint)
        self._parse = parse

    async def read(self, body: bytes, caller: Caller) -> Reading:
        """Parse a body."""
        request = self._parse(body)
        check_tier(request, caller.principal)
        return Reading(request, make_sink)


def check_tier(request: ApiRequest, principal: Principal) -> None:
    """Refuse a class of service that is not the key's.

    Raises:
        InvalidRequest: it is asked for.
    """
    if request.service_tier is ServiceTier.PRIORITY and principal.priority < PRIORITY_HIGH:
        raise InvalidRequest("This key has no priority service.", param="service_tier")


def make_sink(visit: Visit, model: ServedModel, clock: Clock) -> Sink:
    """Return where the answer goes: a stream or a whole."""
    form = answer_format(visit, model, clock)
    if not visit.request.streaming.is_stream:
        return WholeAnswer(visit.exchange, form, visit.request.shown, visit.request.n)
    return StreamedAnswer(
        visit.exchange,
        form,
        visit.request.streaming,
        lambda: total_usage(visit.jobs),
        clock,
        form if isinstance(form, ChatFormat) else None,
    )


def answer_format(visit: Visit, model: ServedModel, clock: Clock) -> AnswerFormat:
    """Return the shapes of this request's answer."""
    serial = visit.request_id.removeprefix("req_")
    is_chat = visit.request.endpoint is Endpoint.CHAT
    head = AnswerHead(
        answer_id=("chatcmpl-" if is_chat else "cmpl-") + serial,
        created_unix_s=int(clock.unix_s()),
        model=model.card.model,
        fingerprint="fp_" + model.card.fingerprint[:12],
        service_tier=visit.request.shown.tier,
    )
    extras = AnswerExtras(visit.request.shown, visit.jobs)
    if not is_chat:
        return CompletionFormat(head, extras)
    tools = visit.request.tools
    return ChatFormat(head, extras, tools.customs if tools is not None else ())
