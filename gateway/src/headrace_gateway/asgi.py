"""The hot endpoints as raw ASGI callables, dispatched by path before FastAPI.

A FastAPI route costs 170-190 us a request, this 50-64. Everything else goes on to the FastAPI app.
No middleware sits around a stream: the disconnect watcher below must own `receive`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass

from opentelemetry.trace import SpanKind

from headrace_common.clock import Clock
from headrace_common.errors import ClientGone, HeadraceError, Internal, Unavailable
from headrace_common.ids import RequestId, new_request_id
from headrace_common.lifecycle import cancel_and_wait
from headrace_common.telemetry import span
from headrace_gateway import error_body
from headrace_gateway.auth import KeyAuth
from headrace_gateway.http_exchange import AsgiApp, HttpExchange, Receive, Scope, Send
from headrace_gateway.metrics import GatewayMetrics
from headrace_gateway.request_flow import RequestFlow
from headrace_gateway.visit import Caller, Dialect, Visit

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HttpLimits:
    """Bounds of one exchange."""

    max_body_bytes: int = 10 * 2**20
    slow_reader_s: float = 30.0


class HotRoute:
    """One generating endpoint.

    Args:
        dialect: how it is spoken.
        auth: checks keys.
        flow: serves what was parsed.
        is_stopping: whether new work is refused.
        limits: of body and client.
    """

    def __init__(
        self,
        dialect: Dialect,
        auth: KeyAuth,
        flow: RequestFlow,
        is_stopping: Callable[[], bool],
        limits: HttpLimits,
    ) -> None:
        self._dialect, self._auth, self._flow = dialect, auth, flow
        self._is_stopping, self._limits = is_stopping, limits

    @property
    def _clock(self) -> Clock:
        return self._flow.clock

    @property
    def _metrics(self) -> GatewayMetrics:
        return self._flow.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; never raises."""
        request_id = new_request_id(self._clock)
        exchange = HttpExchange(scope, receive, send, self._limits.slow_reader_s)
        exchange.headers.append((b"x-request-id", request_id.encode()))
        outcome, started_s = "CANCELLED", self._clock.now_s()
        self._metrics.running.inc()
        try:
            outcome = await self._answer(exchange, scope["method"], request_id)
        finally:
            self._metrics.running.dec()
            name = self._dialect.endpoint.value
            self._metrics.requests.labels(name, outcome).inc()
            elapsed_s = self._clock.now_s() - started_s
            self._metrics.duration_s.labels(name).observe(elapsed_s)
            _log.debug("%s %s %s %.3f s", request_id, name, outcome, elapsed_s)

    async def _answer(self, exchange: HttpExchange, method: str, request_id: RequestId) -> str:
        """Answer and return the outcome's name."""
        try:
            with span(
                "request",
                kind=SpanKind.SERVER,
                attributes={"request_id": request_id, "endpoint": self._dialect.endpoint.value},
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
            _log.exception("%s failed", request_id)
            await self._tell(exchange, Internal(), request_id)
            return Internal.reason

    async def _serve(self, exchange: HttpExchange, method: str, request_id: RequestId) -> str:
        if method != "POST":
            raise error_body.MethodNotAllowed(f"{method[:20]} is not allowed here; use POST.")
        principal = await self._auth.authenticate(exchange.request_headers)
        if self._is_stopping():
            raise Unavailable("The server is stopping.", retry_after_s=1.0)
        body = await exchange.read_body(self._limits.max_body_bytes)
        started_s = self._clock.now_s()
        reading = await self._dialect.read(body, Caller(request_id, principal, exchange))
        visit = Visit(
            request_id, principal, exchange, reading.request, reading.make_sink, started_s
        )
        await self._while_connected(exchange, self._flow.serve(visit))
        blocked = visit.answer is not None and visit.answer.is_blocked
        return "output_blocked" if blocked else "ok"

    async def _while_connected(
        self, exchange: HttpExchange, work: Coroutine[None, None, None]
    ) -> None:
        """Run *work*; cancel it at once when the client leaves.

        Raises:
            ClientGone: it left.
        """
        serving = asyncio.create_task(work)
        watching = asyncio.create_task(exchange.wait_gone())
        try:
            await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done() and not exchange.client_is_gone:
                # The last byte is out; the rest is ours to finish.
                await asyncio.wait({serving})
            if not serving.done():
                raise ClientGone("The client left.")
            serving.result()
        finally:
            await cancel_and_wait(serving, watching)

    async def _tell(
        self, exchange: HttpExchange, error: HeadraceError, request_id: RequestId
    ) -> None:
        """Send an error in the form that is still possible."""
        if isinstance(error, ClientGone) or exchange.client_is_gone or exchange.is_over:
            return
        if error.http_status >= 500:
            _log.warning("%s: %s: %s", request_id, error.reason, error)
        body = self._dialect.error_body(error, request_id)
        try:
            if exchange.has_begun:
                await exchange.send_events(self._dialect.error_event(body), is_last=True)
            else:
                await exchange.send_json(error.http_status, body, error_body.headers(error))
        except ClientGone:
            return


class GatewayApp:
    """The whole ASGI application: hot routes by path, the rest by FastAPI."""

    def __init__(self, hot: Mapping[str, AsgiApp], rest: AsgiApp) -> None:
        self._hot, self._rest = hot, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Dispatch one request."""
        app = self._hot.get(scope["path"], self._rest) if scope["type"] == "http" else self._rest
        await app(scope, receive, send)
