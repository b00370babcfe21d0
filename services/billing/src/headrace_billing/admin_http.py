"""The admin API over HTTP: the Admin, Accounts and Books contracts as REST, with OpenAPI.

Each route is one call of a servicer, so the two ways in cannot differ: the body is the message's
JSON (`headrace_common.proto_json`), names in the path fill fields of it. Callers show an API key
with the scope `admin`. A write with an `Idempotency-Key` header is done once.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from google.protobuf.message import Message

from headrace_billing.admin_errors import add_errors
from headrace_billing.admin_routes import ROUTES, Route
from headrace_billing.csv_text import invoice_csv, usage_csv
from headrace_billing.desk import AdminCall
from headrace_billing.key_rules import check_storable
from headrace_common.errors import InvalidRequest, ScopeMissing, UnknownKey
from headrace_common.proto_json import Json, from_json, schema_of, to_json
from headrace_contracts.billing.v1 import billing_pb2 as pb

PREFIX = "/admin/v1"
MAX_BODY_BYTES = 1024 * 1024


class AdminScopeMissing(ScopeMissing):
    """The key is not an administrator's."""

    public_code = "admin_scope_required"


@dataclass(frozen=True)
class Servicers:
    """Who does the work. Any: a servicer has the contract's methods."""

    admin: Any
    accounts: Any
    books: Any
    ledger: Any


def admin_app(servicers: Servicers, resolve: Callable[[str], Awaitable[pb.Principal]]) -> FastAPI:
    """Build the app.

    Args:
        servicers: do the work.
        resolve: says whom an API key stands for; raises `UnknownKey`.
    """
    app = FastAPI(
        title="Headrace administration",
        description=__doc__.split("\n\n", 1)[1],
        version="1",
        redoc_url=None,
        # A key is never sent on to an address made of the request's own Host.
        redirect_slashes=False,
    )
    door = _Door(resolve)
    for route in ROUTES:
        _add(app, route, getattr(servicers, route.service), door)
    _add_csv(app, servicers, door)
    add_errors(app)
    return app


class _Door:
    """Lets administrators in."""

    def __init__(self, resolve: Callable[[str], Awaitable[pb.Principal]]) -> None:
        self._resolve = resolve

    async def open(self, request: Request) -> AdminCall:
        """Return the call of whoever asks.

        Raises:
            UnknownKey: no key, or not a live one.
            AdminScopeMissing: not an administrator's.
        """
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise UnknownKey("No API key. Send it as `Authorization: Bearer <key>`.")
        principal = await self._resolve(key.strip())
        if "admin" not in principal.scopes:
            raise AdminScopeMissing("This API key lacks the scope 'admin'.")
        return AdminCall(principal.key_id, request.headers.get("idempotency-key", ""))


def _add(app: FastAPI, route: Route, servicer: Any, door: _Door) -> None:  # Any: has the method
    method = getattr(servicer, route.call)

    async def handle(request: Request) -> Response:
        call = await door.open(request)
        message = await _message(route, request)
        return JSONResponse(to_json(await method(message, call)))

    app.add_api_route(
        PREFIX + route.path,
        handle,
        methods=[route.method],
        name=route.call,
        operation_id=route.call,
        summary=(method.__doc__ or route.call).split("\n")[0],
        tags=[route.service],
        openapi_extra=_openapi(route),
        responses=_responses(route),
    )


async def _message(route: Route, request: Request) -> Message:
    body = _query(route, request) if route.method == "GET" else await _body(request)
    wanted: Json = {route.body: body} if route.body else body
    if route.patches:
        if not body:
            # Without names the contract's call would replace every field.
            raise InvalidRequest("The body names no field to change.")
        wanted["fields"] = sorted(body)
    for name, field in route.path_fields.items():
        place = wanted
        *parents, last = field.split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
        named = request.path_params[name]
        if place.get(last) not in (None, named):
            # A copied body, or a wrong address: money could go to either.
            raise InvalidRequest(f"{last} is not the one that the address names.", param=last)
        place[last] = named
    message: Message = from_json(route.request, wanted)
    check_storable(message)
    return message


async def _body(request: Request) -> Json:
    _refuse_query(request)
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > MAX_BODY_BYTES:
            raise InvalidRequest(f"The body exceeds {MAX_BODY_BYTES} bytes.")
    try:
        body: Json = json.loads(raw) if raw else {}
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("The body is not JSON, or too deep.") from error
    if not isinstance(body, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return body


def _refuse_query(request: Request) -> None:
    for name in request.query_params:
        raise InvalidRequest(f"Unknown parameter {name[:100]!r}.", param=name[:100])


def _query(route: Route, request: Request) -> Json:
    fields = route.request.DESCRIPTOR.fields_by_name
    values: Json = {}
    for name, value in request.query_params.multi_items():
        if name not in fields:
            raise InvalidRequest(f"Unknown parameter {name[:100]!r}.", param=name[:100])
        if fields[name].is_repeated:
            values.setdefault(name, []).extend(value.split(","))
        else:
            values[name] = value
    return values


def _openapi(route: Route) -> Json:
    extra: Json = {
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.path_fields
        ],
        "security": [{"adminKey": []}],
    }
    fields = route.request.DESCRIPTOR.fields
    if route.method == "GET":
        extra["parameters"] += [
            {"name": field.name, "in": "query", "schema": {"type": "string"}}
            for field in fields
            if field.name not in route.path_fields.values()
        ]
        return extra
    extra["parameters"].append(
        {"name": "Idempotency-Key", "in": "header", "schema": {"type": "string"}}
    )
    descriptor = route.request.DESCRIPTOR
    if route.body:
        descriptor = descriptor.fields_by_name[route.body].message_type
    schema = schema_of(descriptor)
    extra["requestBody"] = {"content": {"application/json": {"schema": schema}}}
    return extra


def _responses(route: Route) -> dict[int | str, Json]:
    content = {"application/json": {"schema": schema_of(route.response.DESCRIPTOR)}}
    return {200: {"description": "Done.", "content": content}}


def _add_csv(app: FastAPI, servicers: Servicers, door: _Door) -> None:
    usage_route = next(it for it in ROUTES if it.call == "SumUsage")

    @app.get(PREFIX + "/tenants/{tenant_id}/usage.csv", tags=["ledger"], name="usage_csv")
    async def usage(request: Request) -> Response:
        """Usage as CSV; parameters as for the JSON. Without a limit, all rows."""
        call = await door.open(request)
        message = cast("pb.SumUsageRequest", await _message(usage_route, request))
        is_limited, found = bool(message.limit), pb.SumUsageResponse(has_more=True)
        while found.has_more:
            page = await servicers.ledger.SumUsage(message, call)
            found.sums.extend(page.sums)
            found.has_more = page.has_more and not is_limited
            message.offset += len(page.sums)
        return _csv(usage_csv(found))

    @app.get(PREFIX + "/invoices/{invoice_id}/lines.csv", tags=["accounts"], name="invoice_csv")
    async def invoice(request: Request) -> Response:
        """An invoice's lines as CSV."""
        call = await door.open(request)
        _refuse_query(request)
        wanted = pb.GetInvoiceRequest(invoice_id=request.path_params["invoice_id"])
        return _csv(invoice_csv(await servicers.accounts.GetInvoice(wanted, call)))


def _csv(text: str) -> Response:
    return PlainTextResponse(text, media_type="text/csv")
