"""One request on its way through the gateway, in whatever dialect it is spoken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from headrace_common.clock import Clock
from headrace_common.errors import HeadraceError
from headrace_contracts.usage.v1.usage_pb2 import PRICE_TIER_STANDARD, PriceTier
from headrace_gateway.answer import Delivery, Sink, VectorSink
from headrace_gateway.api_request import ApiRequest, Endpoint
from headrace_gateway.error_body import Headers
from headrace_gateway.job import Job
from headrace_gateway.model_directory import ServedModel
from headrace_gateway.model_routes.choice import ModelChoice
from headrace_gateway.principal import Principal


class Exchange(Protocol):
    """A request's connection, or what stands in for it where nobody waits at the other end."""

    # Sent with the status line, whatever the answer.
    headers: Headers
    has_begun: bool
    is_over: bool
    client_is_gone: bool
    # Of those that are numbered.
    num_events: int
    # The client's own id of the request; empty = none. Ours stays what it is.
    client_id: str

    @property
    def request_headers(self) -> Mapping[bytes, bytes]:
        """The request's headers: see `request_headers.headers_by_name`."""
        ...

    async def send_json(self, status: int, body: bytes, extra: Headers | None = None) -> None:
        """Send a whole answer."""
        ...

    async def begin_stream(self) -> None:
        """Send the status line of an event stream."""
        ...

    async def send_events(self, events: bytes, *, is_last: bool = False) -> None:
        """Send whole events."""
        ...

    def try_send_events(self, events: bytes) -> bool:
        """Send whole events of a stream that has begun, if nothing must be waited for."""
        ...


# Returns the events that end a stream of so many events, from the JSON of an error.
EndFailed = Callable[[bytes, int], Awaitable[bytes]]


class WatchedExchange(Exchange, Protocol):
    """An exchange that tells when its client leaves."""

    # How its stream ends that fails after its first event; None = by the endpoint's error event.
    end_failed: EndFailed | None

    def on_gone(self, callback: Callable[[], None] | None) -> None:
        """Call back when the client leaves before its answer is over; None = no more."""
        ...


@dataclass(slots=True)
class Visit:
    """One request at the gateway, from the moment its body was read."""

    request_id: str
    principal: Principal
    exchange: Exchange
    request: ApiRequest
    make_sink: MakeSink
    started_s: float
    price_tier: PriceTier.ValueType = PRICE_TIER_STANDARD
    # How its model was found; None = not yet.
    choice: ModelChoice | None = None
    # What is known once it was admitted.
    jobs: list[Job] = field(default_factory=list)
    # Not the answer itself: its sink knows the visit, and what is held in a ring only a full
    # collection frees.
    delivery: Delivery | None = None
    # Called when it is admitted, before anything is worked on; what it raises refuses the request.
    on_admitted: Callable[[], Awaitable[None]] | None = None
    # Done once the ledger cannot miss it any more.
    recorded: asyncio.Future[None] | None = None
    # Seconds of each stage that is over.
    stages_s: dict[str, float] = field(default_factory=dict)


# Makes the place where a request's answer goes.
MakeSink = Callable[[Visit, ServedModel, Clock], Sink | VectorSink]


@dataclass(slots=True)
class Caller:
    """Who asks, and by which request."""

    request_id: str
    principal: Principal
    exchange: Exchange


@dataclass(slots=True)
class Reading:
    """A body understood: what is asked for, and in which form the answer goes out."""

    request: ApiRequest
    make_sink: MakeSink
    # Takes the request away from its connection and returns what is told at once, or the events to
    # read along with; None = it stays.
    detach: Callable[[Visit], Awaitable[bytes | AsyncIterator[bytes]]] | None = None
    # See `WatchedExchange`.
    end_failed: EndFailed | None = None


class ErrorForm(Protocol):
    """The name of an endpoint and the shape of its errors."""

    @property
    def endpoint(self) -> Endpoint:
        """Its label."""
        ...

    @property
    def id_headers(self) -> tuple[bytes, ...]:
        """The headers that carry the request id."""
        ...

    @property
    def query_params(self) -> tuple[str, ...]:
        """The query parameters that may be given."""
        ...

    def error_body(self, error: HeadraceError, request_id: str) -> bytes:
        """Return the JSON of an error."""
        ...

    def error_event(self, body: bytes, num_events: int) -> bytes:
        """Return the events that end a stream of so many events, from the JSON of an error."""
        ...


class Dialect(ErrorForm, Protocol):
    """How one endpoint is spoken: bodies in, answers and errors out."""

    async def read(self, body: bytes, caller: Caller) -> Reading:
        """Parse a body.

        Raises:
            HeadraceError: it is wrong; `param` names the field at fault.
        """
        ...
