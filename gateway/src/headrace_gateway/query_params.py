"""Query parameters that an endpoint does not know are refused by name, like fields of a body."""

from __future__ import annotations

from collections.abc import Container
from urllib.parse import parse_qsl

from fastapi import Request
from fastapi.routing import APIRoute

from headrace_common.errors import InvalidRequest
from headrace_gateway.auth import KeyAuth
from headrace_gateway.messages_api.dialect import MessagesDialect

_MAX_PARAMS = 64


def check_query(query: bytes, known: Container[str] = ()) -> None:
    """Refuse what is not known, and what is given twice.

    Raises:
        InvalidRequest: `param` names it.
    """
    if not query:
        return
    try:
        given = parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=_MAX_PARAMS)
    except ValueError:
        raise InvalidRequest("The query string is wrong, or too long.") from None
    seen: set[str] = set()
    for name, _ in given:
        # Lists are spelled `include[]=` by some SDKs.
        param = name.removesuffix("[]")[:100]
        if name not in known:
            raise InvalidRequest(f"Unrecognized query parameter: {param}.", param=param)
        if name in seen:
            raise InvalidRequest(f"The query parameter {param} is given twice.", param=param)
        seen.add(name)


class RouteCheck:
    """A dependency of all FastAPI routes: first the key, then the names of the query's parameters.

    Args:
        auth: checks keys.
    """

    def __init__(self, auth: KeyAuth) -> None:
        self._auth = auth

    async def __call__(self, request: Request) -> None:
        """Check a request by what its route's function takes.

        Raises:
            UnknownKey: no good key came with it.
            InvalidRequest: `param` names what is wrong.
        """
        route = request.scope["route"]
        # Who probes /health with a query of its own is no client that would be misled.
        if isinstance(route, APIRoute) and route.path.startswith("/v1/"):
            await self._auth.authenticate(request.headers.raw)
            if not route.include_in_schema:
                # It is there to say that it is none.
                return
            known = {field.alias for field in route.dependant.query_params}
            if route.path.startswith("/v1/messages/"):
                known.update(MessagesDialect.query_params)
            check_query(request.scope["query_string"], known)
