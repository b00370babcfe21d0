"""The hot endpoints as raw ASGI callables, dispatched by path before FastAPI.

A FastAPI route costs 170-190 us a request, this 50-64. Everything else goes on to the FastAPI app.
No middleware sits around a stream: the server tells the exchange at once when its client leaves.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass

from opentelemetry.trace import SpanKind

from headrace_common.clock import Clock
from headrace_common.errors import ClientGone, HeadraceError, Internal, Unavailable
from headrace_common.ids import RequestId, new_request_id
from headrace_common.telemetry import span
from headrace_gateway import error_body
from headrace_gateway.auth import KeyAuth, check_scope, key_digest
from headrace_gateway.client_ids import client_request_id
from headrace_gateway.http_exchange import AsgiApp, HttpExchange, Receive, Scope, Send
from headrace_gateway.idempotency import IDEMPOTENCY_KEY, Idempotency
from headrace_gateway.limit_states import Standing
from headrace_gateway.metrics import GatewayMetrics
from headrace_gateway.pricing import price_tier
from headrace_gateway.principal import Principal
from headrace_gateway.query_params import check_query
from headrace_gateway.rate_headers import is_limit_header, limit_headers
from headrace_gateway.request_flow import RequestFlow
from headrace_gateway.visit import Caller, Dialect, ErrorForm, Exchange, Visit, WatchedExchange

_log = logging.getLogger(__name__)


# Makes the JSON of an answer.
Call = Callable[[Caller, bytes], Awaitable[bytes]]


@dataclass(frozen=True)
class HttpLimits:
    """Bounds of one exchange."""

    max_body_bytes: int = 10 * 2**20
    slow_reader_s: float = 30.0


@dataclass(frozen=True)
class RouteContext:
    """What all routes of a gateway share.

    Args:
        auth: checks keys.
        limits: of body and client.
        clock: time.
        metrics: requests are counted.
        standing: how a caller's limits stand, for answers that were not admitted.
        idempotency: answers what is sent twice.
    """

    auth: KeyAuth
    limits: HttpLimits
    clock: Clock
    metrics: GatewayMetrics
    standing: Callable[[Principal], Awaitable[Standing]]
    idempotency: Idempotency


class ApiRoute(ABC):
    """A POST with a JSON body: authenticated, bounded, counted, its errors in one shape.

    Args:
        form: its name and the shape of its errors.
        context: see `RouteContext`.
    """

    def __init__(self, form: ErrorForm, context: RouteContext) -> None:
        self._form, self._context = form, context
        self._name = form.endpoint.value
        self._durations_s = context.metrics.duration_s.labels(self._name)

    @abstractmethod
    async def _work(self, caller: Caller, exchange: WatchedExchange, body: bytes) -> str:
        """Answer; return the outcome's name."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; never raises."""
        context = self._context
        request_id = new_request_id(context.clock)
        exchange = HttpExchange(scope, receive, context.limits.slow_reader_s)
        encoded_id = request_id.encode()
        exchange.headers += [(name, encoded_id) for name in self._form.id_headers]
        outcome, started_s = "CANCELLED", context.clock.now_s()
        context.metrics.running.inc()
        try:
            outcome = await self._answer(exchange, scope["method"], request_id)
        finally:
            context.metrics.running.inc(-1)
            context.metrics.requests.labels(self._name, outcome).inc()
            elapsed_s = context.clock.now_s() - started_s
            self._durations_s.observe(elapsed_s)
            named = _named(request_id, exchange)
            _log.debug("%s %s %s %.3f s", named, self._name, outcome, elapsed_s)

    async def _answer(self, exchange: HttpExchange, method: str, request_id: RequestId) -> str:
        """Answer and return the outcome's name."""
        try:
            with span(
                "request",
                kind=SpanKind.SERVER,
                attributes={"request_id": request_id, "endpoint": self._name},
            ):
                return await self._serve(exchange, method, request_id)
        except HeadraceError as error:
            await self._tell(exchange, error, request_id)
            return error.reason
        except asyncio.CancelledError:
            # The server's grace has ended, unless it was the client.
            if exchange.client_is_gone:
                return ClientGone.reason
            await self._tell(exchange, Unavailable("The server is stopping."), request_id)
            return Unavailable.reason
        except Exception:  # noqa: BLE001 - the edge: logged, and told without text from inside
            _log.exception("%s failed", _named(request_id, exchange))
            await self._tell(exchange, Internal(), request_id)
            return Internal.reason

    async def _serve(self, exchange: HttpExchange, method: str, request_id: RequestId) -> str:
        if method != "POST":
            raise error_body.MethodNotAllowed(
                f"{method[:20]} is not allowed here; use POST.", ("POST",)
            )
        context = self._context
        headers = exchange.request_headers
        principal = await context.auth.resolve(key_digest(headers))
        try:
            check_scope(principal, "inference")
            check_query(exchange.query, self._form.query_params)
            exchange.client_id = client_request_id(headers)
            body = await exchange.read_body(context.limits.max_body_bytes)
            caller = Caller(request_id, principal, exchange)
            if headers.get(IDEMPOTENCY_KEY):
                return await context.idempotency.run(caller, exchange, body, self._work)
            return await self._work(caller, exchange, body)
        except HeadraceError as error:
            if not any(map(is_limit_header, error.metadata)):
                await self._add_standing(exchange, principal)
            raise

    async def _add_standing(self, exchange: Exchange, principal: Principal) -> None:
        """Let the answer tell of limits, if it does not yet and somebody reads it."""
        is_told = any(is_limit_header(name.decode()) for name, _ in exchange.headers)
        if is_told or exchange.has_begun or exchange.client_is_gone:
            return
        exchange.headers += limit_headers(await self._context.standing(principal))

    async def _tell(
        self, exchange: HttpExchange, error: HeadraceError, request_id: RequestId
    ) -> None:
        """Send an error in the form that is still possible."""
        if isinstance(error, ClientGone) or exchange.client_is_gone or exchange.is_over:
            return
        if error.http_status >= 500:
            _log.warning("%s: %s: %s", _named(request_id, exchange), error.reason, error)
        body = self._form.error_body(error, request_id)
        try:
            if exchange.has_begun:
                num_events = exchange.num_events
                if exchange.end_failed is not None and num_events:
                    events = await exchange.end_failed(body, num_events)
                else:
                    events = self._form.error_event(body, num_events)
                await exchange.send_events(events, is_last=True)
            else:
                await exchange.send_json(error.http_status, body, error_body.headers(error))
        except ClientGone:
            return


class HotRoute(ApiRoute):
    """One generating endpoint.

    Args:
        dialect: how it is spoken.
        context: see `RouteContext`.
        flow: serves what was parsed.
    """

    def __init__(self, dialect: Dialect, context: RouteContext, flow: RequestFlow) -> None:
        super().__init__(dialect, context)
        self._dialect, self._flow = dialect, flow

    async def _work(self, caller: Caller, exchange: WatchedExchange, body: bytes) -> str:
        started_s = self._context.clock.now_s()
        reading = await self._dialect.read(body, caller)
        visit = Visit(
            caller.request_id,
            caller.principal,
            exchange,
            reading.request,
            reading.make_sink,
            started_s,
            price_tier(reading.request),
        )
        if reading.detach is not None:
            await while_connected(exchange, _send_all(exchange, reading.detach(visit)))
            return "ok"
        exchange.end_failed = reading.end_failed
        await while_connected(exchange, self._flow.serve(visit))
        blocked = visit.delivery is not None and visit.delivery.is_blocked
        return "output_blocked" if blocked else "ok"


class CallRoute(ApiRoute):
    """An endpoint that answers with one JSON object and generates nothing.

    Args:
        form: its name and the shape of its errors.
        context: see `RouteContext`.
        call: makes the answer; cancelled when the client leaves.
    """

    def __init__(self, form: ErrorForm, context: RouteContext, call: Call) -> None:
        super().__init__(form, context)
        self._call = call

    async def _work(self, caller: Caller, exchange: WatchedExchange, body: bytes) -> str:
        async def answer() -> None:
            answer = await self._call(caller, body)
            await self._add_standing(exchange, caller.principal)
            await exchange.send_json(200, answer)

        await while_connected(exchange, answer())
        return "ok"


class GatewayApp:
    """The whole ASGI application: hot routes by path, the rest by FastAPI.

    Args:
        hot: applications by path.
        posts: applications by path for POST alone.
        rest: everything else.
    """

    def __init__(
        self, hot: Mapping[str, AsgiApp], posts: Mapping[str, AsgiApp], rest: AsgiApp
    ) -> None:
        self._hot, self._posts, self._rest = hot, posts, rest

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Dispatch one request."""
        app = self._rest
        if scope["type"] == "http":
            others = self._posts if scope["method"] == "POST" else {}
            app = self._hot.get(scope["path"]) or others.get(scope["path"], self._rest)
        return app(scope, receive, send)


def _named(request_id: RequestId, exchange: HttpExchange) -> str:
    """Return how the log calls a request: with its client's name for it, if it has one."""
    client_id = exchange.client_id
    return f"{request_id} (of its client: {client_id})" if client_id else request_id


async def _send_all(exchange: Exchange, told: Awaitable[bytes | AsyncIterator[bytes]]) -> None:
    """Send what is told of an answer that is made elsewhere: one object, or its events."""
    answer = await told
    if isinstance(answer, bytes):
        await exchange.send_json(200, answer)
        return
    await exchange.begin_stream()
    async for piece in answer:
        await exchange.send_events(piece)
    await exchange.send_events(b"", is_last=True)


async def while_connected(exchange: WatchedExchange, work: Coroutine[None, None, None]) -> None:
    """Run *work* in this task; cancel it at once when the client leaves.

    Raises:
        ClientGone: it left.
    """
    task = asyncio.current_task()
    has_left = False

    def leave() -> None:
        nonlocal has_left
        has_left = True
        if task is not None:
            task.cancel()

    exchange.on_gone(leave)
    try:
        await work
    except asyncio.CancelledError:
        if has_left:
            raise ClientGone("The client left.") from None
        raise
    finally:
        exchange.on_gone(None)
        if has_left and task is not None:
            task.uncancel()
