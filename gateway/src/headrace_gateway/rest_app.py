"""The FastAPI app for everything that is not hot, with errors in the one public shape."""

from __future__ import annotations

import logging

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from headrace_common.clock import Clock
from headrace_common.errors import HeadraceError, Internal, InvalidRequest
from headrace_common.ids import new_request_id
from headrace_gateway import error_body
from headrace_gateway.http_exchange import AsgiApp, Event, Receive, Scope, Send
from headrace_gateway.openapi_hot import add_hot_paths

_log = logging.getLogger(__name__)

# Key in the scope.
_REQUEST_ID = "headrace.request_id"


class RequestIds:
    """Gives every request an id, and says it in every answer's `x-request-id`."""

    def __init__(self, app: AsgiApp, clock: Clock) -> None:
        self._app, self._clock = app, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope[_REQUEST_ID] = new_request_id(self._clock)

        async def named(message: Event) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        await self._app(scope, receive, named)


def rest_app(routers: list[APIRouter], clock: Clock) -> AsgiApp:
    """Build the app."""
    app = FastAPI(
        title="Headrace",
        description="An LLM serving fleet's public API, compatible with OpenAI's.",
        redoc_url=None,
    )
    for router in routers:
        app.include_router(router)
    add_hot_paths(app)

    def answer(
        request: Request, error: HeadraceError, extra: dict[str, str] | None = None
    ) -> Response:
        headers = {name.decode(): value.decode() for name, value in error_body.headers(error)}
        return Response(
            error_body.render(error, request.scope[_REQUEST_ID]),
            status_code=error.http_status,
            media_type="application/json",
            headers={**headers, **(extra or {})},
        )

    @app.exception_handler(HeadraceError)
    async def on_headrace_error(request: Request, error: HeadraceError) -> Response:
        return answer(request, error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, _error: RequestValidationError) -> Response:
        return answer(request, InvalidRequest("The request's parameters are wrong."))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        url = request.url.path[:200]
        if error.status_code == 405:
            refused = error_body.MethodNotAllowed(f"{request.method} is not allowed on {url}.")
            return answer(request, refused, dict(error.headers or {}))
        unknown = error_body.UnknownUrl(f"Unknown request URL: {request.method} {url}.")
        return answer(request, unknown)

    @app.exception_handler(Exception)
    async def on_failure(request: Request, error: Exception) -> Response:
        _log.error("%s failed", request.url.path, exc_info=error)
        return answer(request, Internal())

    return RequestIds(app, clock)
