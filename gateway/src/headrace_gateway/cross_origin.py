"""Lets web pages of other origins call the API from a browser (CORS), where an operator says so.

Keys travel in headers and never in cookies, so no page gets more than the key that it holds.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from headrace_gateway.error_body import Headers
from headrace_gateway.http_exchange import EXTRA_HEADERS, AsgiApp, Receive, Scope, Send

# What pages may read of an answer, beside its body.
_EXPOSED = ", ".join(
    (
        "x-request-id", "request-id", "retry-after", "retry-after-ms", "idempotent-replayed",
        "x-should-retry",
        "ratelimit", "ratelimit-policy", "x-headrace-replica", "x-headrace-cached-tokens",
        "x-headrace-queue-ms", "x-headrace-model", "x-headrace-route", "x-headrace-fallback",
        "openai-processing-ms",
        *(
            f"x-ratelimit-{what}-{of}"
            for what in ("limit", "remaining", "reset")
            for of in ("requests", "tokens")
        ),
    )
).encode()  # fmt: skip
_METHODS = b"GET, HEAD, POST, DELETE, OPTIONS"
_MAX_AGE_S = b"600"
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2048}")
_VARY = (b"vary", b"origin")


class CrossOrigin:
    """Answers preflights, and marks every answer to an allowed origin.

    Args:
        app: what answers.
        origins: allowed ones such as `https://app.example.com`; `*` = any.
    """

    def __init__(self, app: AsgiApp, origins: Collection[str]) -> None:
        self._app = app
        self._allows_any = "*" in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = dict(scope["headers"])
        origin = sent.get(b"origin", b"")
        allowed = self._allowed(origin)
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in sent:
            asked = sent.get(b"access-control-request-headers", b"")
            await _answer_preflight(send, allowed, asked)
            return
        scope[EXTRA_HEADERS] = [*allowed, (b"access-control-expose-headers", _EXPOSED)]
        if not allowed:
            scope[EXTRA_HEADERS] = [_VARY]
        await self._app(scope, receive, send)

    def _allowed(self, origin: bytes) -> Headers:
        """Return the headers that allow an origin; none if it is not allowed."""
        if not origin:
            return []
        if self._allows_any:
            return [(b"access-control-allow-origin", b"*")]
        if origin in self._origins:
            return [(b"access-control-allow-origin", origin), _VARY]
        return []


async def _answer_preflight(send: Send, allowed: Headers, asked: bytes) -> None:
    headers: Headers = [_VARY] if not allowed else list(allowed)
    if allowed:
        headers += [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", _MAX_AGE_S),
        ]
        if _HEADER_NAMES.fullmatch(asked):
            # `*` would leave out `Authorization`.
            headers.append((b"access-control-allow-headers", asked))
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
