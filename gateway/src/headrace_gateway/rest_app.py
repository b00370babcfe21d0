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
from headrace_gateway.openapi_hot import add_hot_paths

_log = logging.getLogger(__name__)


def rest_app(routers: list[APIRouter], clock: Clock) -> FastAPI:
    """Build the app."""
    app = FastAPI(
        title="Headrace",
        description="An LLM serving fleet's public API, compatible with OpenAI's.",
        redoc_url=None,
    )
    for router in routers:
        app.include_router(router)
    add_hot_paths(app)

    def answer(error: HeadraceError, extra: dict[str, str] | None = None) -> Response:
        request_id = new_request_id(clock)
        headers = {name.decode(): value.decode() for name, value in error_body.headers(error)}
        return Response(
            error_body.render(error, request_id),
            status_code=error.http_status,
            media_type="application/json",
            headers={"x-request-id": request_id, **headers, **(extra or {})},
        )

    @app.exception_handler(HeadraceError)
    async def on_headrace_error(_request: Request, error: HeadraceError) -> Response:
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_request: Request, _error: RequestValidationError) -> Response:
        return answer(InvalidRequest("The request's parameters are wrong."))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        url = request.url.path[:200]
        if error.status_code == 405:
            refused = error_body.MethodNotAllowed(f"{request.method} is not allowed on {url}.")
            return answer(refused, dict(error.headers or {}))
        return answer(error_body.UnknownUrl(f"Unknown request URL: {request.method} {url}."))

    @app.exception_handler(Exception)
    async def on_failure(request: Request, error: Exception) -> Response:
        _log.error("%s failed", request.url.path, exc_info=error)
        return answer(Internal())

    return app
