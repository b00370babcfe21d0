"""/v1/messages: bodies in, answers and errors out."""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from headrace_common.clock import Clock
from headrace_common.errors import HeadraceError, InvalidRequest
from headrace_contracts.usage.v1.usage_pb2 import PRICE_TIER_BATCH
from headrace_gateway.answer import Sink, total_usage
from headrace_gateway.answer_extras import Json
from headrace_gateway.api_request import Endpoint
from headrace_gateway.event_stream import named_event
from headrace_gateway.messages_api.schema import ThreadUnsupported, parse_messages
from headrace_gateway.messages_api.sinks import StreamedMessage, WholeMessage
from headrace_gateway.model_directory import ServedModel
from headrace_gateway.visit import Caller, Exchange, Reading, Visit

# The newer one takes less (no sampling parameters) and answers the same; what it dropped is
# honoured here under both.
_VERSIONS = (b"", b"2023-06-01", b"2026-10-21")
_CLIENTS_FAULT = "invalid_request_error"
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesDialect:
    """How /v1/messages is spoken."""

    endpoint = Endpoint.MESSAGES
    id_headers = (b"x-request-id", b"request-id")
    # The SDK says so of its beta client; what its betas add is in the body.
    query_params = ("beta",)

    async def read(self, body: bytes, caller: Caller) -> Reading:
        """Parse a body.

        Raises:
            InvalidRequest: it is wrong.
        """
        check_version(caller.exchange)
        return Reading(parse_messages(body), make_sink)

    def error_body(self, error: HeadraceError, request_id: str) -> bytes:
        """Return the JSON of an error."""
        return message_error(error, request_id)

    def error_event(self, body: bytes, num_events: int) -> bytes:
        """Return the error as an event; there is no end mark."""
        return named_event("error", body)


def message_error(error: HeadraceError, request_id: str) -> bytes:
    """Render an error in the shape of this API."""
    message = error.public_message
    if error.param and error.param not in message:
        message = f"{error.param}: {message}"
    if error.http_status >= 500:
        message = f"{message} (request id {request_id})"
    is_ours = error.http_status >= 500
    kind = _ERROR_TYPES.get(error.http_status, "api_error" if is_ours else _CLIENTS_FAULT)
    if error.public_type == "insufficient_quota":
        kind = "billing_error"
    told: Json = {"type": kind, "message": message}
    if isinstance(error, ThreadUnsupported):
        told["details"] = {"error_code": error.public_code, "unsupported": ["thread"]}
    return orjson.dumps({"type": "error", "error": told, "request_id": request_id})


def is_anthropic(path: str, headers: Mapping[str, str]) -> bool:
    """Whether a request speaks this API: by its path, or by the version that it names."""
    return path.startswith("/v1/messages") or "anthropic-version" in headers


def check_version(exchange: Exchange) -> None:
    """Refuse a version of the API that is not spoken here; none given is the newest.

    Raises:
        InvalidRequest: another one is asked for.
    """
    if exchange.request_headers.get(b"anthropic-version", b"") not in _VERSIONS:
        raise InvalidRequest(
            "anthropic-version: 2023-06-01 and 2026-10-21 are spoken here.",
            param="anthropic-version",
        )


def make_sink(visit: Visit, model: ServedModel, clock: Clock) -> Sink:
    """Return where the answer goes: a stream or a whole."""
    message_id = "msg_" + visit.request_id.removeprefix("req_")
    if not visit.request.streaming.is_stream:
        tier = "batch" if visit.price_tier == PRICE_TIER_BATCH else "standard"
        return WholeMessage(visit.exchange, message_id, model.card.model, tier)
    return StreamedMessage(
        visit.exchange, message_id, model.card.model, lambda: total_usage(visit.jobs), clock
    )
