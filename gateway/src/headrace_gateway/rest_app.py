"""The FastAPI app for everything that is not hot, with errors in the one public shape."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from http import HTTPStatus

import orjson
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Match

from headrace_common.clock import Clock
from headrace_common.errors import HeadraceError, Internal, InvalidRequest
from headrace_common.ids import new_request_id
from headrace_gateway import error_body
from headrace_gateway.auth import KeyAuth
from headrace_gateway.call_rate import CallRate
from headrace_gateway.http_exchange import (
    EXTRA_HEADERS,
    AsgiApp,
    Event,
    Receive,
    Scope,
    Send,
    check_coding,
)
from headrace_gateway.messages_api.dialect import is_anthropic, message_error
from headrace_gateway.openapi_hot import whole_openapi
from headrace_gateway.query_params import RouteCheck

_log = logging.getLogger(__name__)

# Key in the scope.
_REQUEST_ID = "headrace.request_id"


class RestFront:
    """In front of FastAPI: gives every answer its request id, and answers HEAD as GET.

    Who calls too often is refused here: FastAPI would take as long for that as for an answer. So is
    a compressed body, which it would take for what it says.

    Args:
        app: answers.
        auth: tells who calls.
        rate: bounds how often.
        clock: for ids.
    """

    def __init__(self, app: AsgiApp, auth: KeyAuth, rate: CallRate, clock: Clock) -> None:
        self._app, self._auth, self._rate, self._clock = app, auth, rate, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            # The server leaves the body out: it looks at its own scope.
            scope = {**scope, "method": "GET"}
        request_id = scope[_REQUEST_ID] = new_request_id(self._clock)
        names = [b"x-request-id"]
        if is_anthropic(scope["path"], Headers(scope=scope)):
            names.append(b"request-id")
        encoded_id = request_id.encode()
        extra = [*((name, encoded_id) for name in names), *(scope.get(EXTRA_HEADERS) or ())]

        async def named(message: Event) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        refusal = await self._refusal(scope)
        await (refusal or self._app)(scope, receive, named)

    async def _refusal(self, scope: Scope) -> Response | None:
        if not scope["path"].startswith("/v1/"):
            return None
        try:
            principal = await self._auth.authenticate(scope["headers"])
        except HeadraceError:
            # The app tells why, in the shape of the path.
            return None
        try:
            self._rate.count(principal.tenant_id)
            coding = Headers(scope=scope).get("content-encoding", "")
            check_coding(coding.encode("latin-1"))
        except HeadraceError as error:
            return _answer(Request(scope), error)
        return None


def rest_app(
    routers: Sequence[APIRouter],
    posts: Collection[str],
    auth: KeyAuth,
    rate: CallRate,
    clock: Clock,
) -> AsgiApp:
    """Build the app.

    Args:
        routers: its routes.
        posts: paths whose POST is answered elsewhere.
        auth: checks keys, before anything else is looked at.
        rate: bounds how often a tenant calls.
        clock: for request ids.
    """
    app = FastAPI(
        title="Headrace",
        description="An LLM serving fleet's public API, compatible with OpenAI's.",
        # Made anew for each request, FastAPI's own would stop every stream for as long.
        openapi_url=None,
        # A key is never sent on to an address made of the request's own Host.
        redirect_slashes=False,
        dependencies=[Depends(RouteCheck(auth))],
    )
    for router in routers:
        app.include_router(router)
    _add_documents(app)

    @app.exception_handler(HeadraceError)
    async def on_headrace_error(request: Request, error: HeadraceError) -> Response:
        return _answer(request, error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        return _answer(request, _explain(error))

    @app.exception_handler(404)
    async def on_unknown(request: Request, error: HTTPException) -> Response:
        if request.url.path in posts:
            return await on_other_method(request, error)
        asked = f"{request.method[:20]} {request.url.path[:200]}"
        return _answer(request, error_body.UnknownUrl(f"Unknown request URL: {asked}."))

    @app.exception_handler(405)
    async def on_other_method(request: Request, _error: HTTPException) -> Response:
        told = f"{request.method[:20]} is not allowed on {request.url.path[:200]}."
        allowed = _allowed(request, routers, posts)
        return _answer(request, error_body.MethodNotAllowed(told, allowed))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        # Its own text may be about the framework's inside.
        told = f"The request is refused: {HTTPStatus(error.status_code).phrase}."
        kind = Internal() if error.status_code >= 500 else InvalidRequest(told)
        answer = _answer(request, kind)
        answer.status_code = error.status_code
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def on_failure(request: Request, error: Exception) -> Response:
        _log.error("%s failed", request.url.path, exc_info=error)
        return _answer(request, Internal())

    return RestFront(app, auth, rate, clock)


def _add_documents(app: FastAPI) -> None:
    document = orjson.dumps(whole_openapi(app))

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Response(document, media_type="application/json")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return get_swagger_ui_html(openapi_url="/openapi.json", title=f"{app.title} - API")


def _allowed(request: Request, routers: Sequence[APIRouter], posts: Collection[str]) -> set[str]:
    """Return the methods of a path that exists."""
    methods = {"POST"} if request.url.path in posts else set()
    for router in routers:
        for route in router.routes:
            # Routes that are there to say "not found" are none.
            if not isinstance(route, APIRoute) or not route.include_in_schema:
                continue
            if route.matches(request.scope)[0] is not Match.NONE:
                methods |= route.methods or set()
    return methods | ({"HEAD"} if "GET" in methods else set())


def _answer(request: Request, error: HeadraceError) -> Response:
    """Tell an error in the shape that its client knows."""
    request_id = request.scope[_REQUEST_ID]
    headers = {name.decode(): value.decode() for name, value in error_body.headers(error)}
    if is_anthropic(request.url.path, request.headers):
        body = message_error(error, request_id)
    else:
        body = error_body.render(error, request_id)
    return Response(
        body, status_code=error.http_status, media_type="application/json", headers=headers
    )


def _explain(error: RequestValidationError) -> InvalidRequest:
    """Name the parameter that is wrong."""
    for fault in error.errors():
        place = [str(part) for part in fault["loc"][1:]]
        if place:
            param = ".".join(place)[:100]
            return InvalidRequest(f"Invalid value for {param}: {fault['msg']}.", param=param)
    return InvalidRequest("The request's parameters are wrong.")
