"""What the admin API says to what it does not do: the public error object, for each way to fail."""

from __future__ import annotations

import logging
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match

from headrace_common.errors import HeadraceError, Internal, InvalidRequest, NotFound, error_body

_log = logging.getLogger(__name__)


class UnknownUrl(NotFound):
    """No route has this path."""

    public_code = "unknown_url"


class MethodNotAllowed(NotFound):
    """The path has routes, for other methods."""

    http_status = 405
    public_code = "method_not_allowed"


def add_errors(app: FastAPI) -> None:
    """Render every error of *app*, those of its framework too."""

    @app.exception_handler(HeadraceError)
    async def on_error(_request: Request, error: HeadraceError) -> Response:
        headers = {}
        if error.retry_after_s is not None:
            headers["retry-after"] = str(max(1, round(error.retry_after_s)))
        if error.http_status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(error_body(error), status_code=error.http_status, headers=headers)

    @app.exception_handler(404)
    async def on_unknown(request: Request, _error: HTTPException) -> Response:
        return await on_error(request, UnknownUrl(f"Unknown request URL: {_asked(request)}."))

    @app.exception_handler(405)
    async def on_other_method(request: Request, _error: HTTPException) -> Response:
        answer = await on_error(request, MethodNotAllowed(f"{_asked(request)} is not offered."))
        answer.headers["allow"] = ", ".join(sorted(_methods(app, request)))
        return answer

    @app.exception_handler(HTTPException)
    async def on_http_error(_request: Request, error: HTTPException) -> Response:
        # Its own text may be about the framework's inside.
        told = f"The request is refused: {HTTPStatus(error.status_code).phrase}."
        kind = Internal() if error.status_code >= 500 else InvalidRequest(told)
        return JSONResponse(error_body(kind), status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def on_failure(request: Request, error: Exception) -> Response:
        _log.error("%s failed", request.url.path, exc_info=error)
        return JSONResponse(error_body(Internal()), status_code=500)


def _asked(request: Request) -> str:
    return f"{request.method[:20]} {request.url.path[:200]}"


def _methods(app: FastAPI, request: Request) -> set[str]:
    """Return those of all routes of this path: the framework names its first route's only."""
    fitting = (
        route.methods or set()
        for route in app.routes
        if isinstance(route, APIRoute) and route.matches(request.scope)[0] is not Match.NONE
    )
    return set().union(*fitting)
