"""`HeadraceError` to HTTP: status, headers, JSON body. The only place where this is decided."""

from __future__ import annotations

import math
from collections.abc import Collection

import orjson

from headrace_common.errors import (
    HeadraceError,
    InvalidRequest,
    NotFound,
    UnknownKey,
    error_body,
)
from headrace_gateway.rate_headers import is_limit_header

Headers = list[tuple[bytes, bytes]]
# Statuses that SDKs repeat by themselves, and Claude Code a wrong key ten times for minutes, unless
# they are told that it is of no use.
_REPEATED = (401, 409, 429, 501)


class BodyTooLarge(InvalidRequest):
    """The request body is over the limit."""

    reason = "BODY_TOO_LARGE"
    http_status = 413
    public_code = "request_too_large"


class BodyTimeout(InvalidRequest):
    """The request body came too slowly."""

    reason = "BODY_TIMEOUT"
    http_status = 408
    public_code = "request_timeout"


class UnsupportedEncoding(InvalidRequest):
    """The body is compressed or not JSON by its own header."""

    reason = "UNSUPPORTED_ENCODING"
    http_status = 415
    public_code = "unsupported_media_type"


class IdempotencyConflict(InvalidRequest):
    """An idempotency key was used with another body."""

    reason = "IDEMPOTENCY_CONFLICT"
    http_status = 409
    public_code = "idempotency_key_reused"


class RequestInProgress(InvalidRequest):
    """The request with the same idempotency key is not over yet."""

    reason = "REQUEST_IN_PROGRESS"
    http_status = 409
    retryable = True
    public_code = "request_in_progress"


class UnknownUrl(NotFound):
    """No such route."""

    reason = "UNKNOWN_URL"
    public_code = "unknown_url"


class MethodNotAllowed(NotFound):
    """The route exists, the method does not.

    Args:
        public_message: see `HeadraceError`.
        allowed: the methods that do.
    """

    reason = "METHOD_NOT_ALLOWED"
    http_status = 405
    public_code = "method_not_allowed"

    def __init__(self, public_message: str, allowed: Collection[str]) -> None:
        super().__init__(public_message)
        self.allowed = ", ".join(sorted(allowed))


def render(error: HeadraceError, request_id: str) -> bytes:
    """Render the JSON body; a server error carries the request id, so that it can be reported."""
    body = error_body(error)
    if error.http_status >= 500:
        body["error"]["message"] = f"{error.public_message} (request id {request_id})"
    return orjson.dumps(body)


def headers(error: HeadraceError) -> Headers:
    """Return the headers that this error adds. Retry-After is rounded up, so that it is true."""
    added: Headers = []
    if error.retry_after_s is not None:
        added.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
        added.append((b"retry-after-ms", b"%d" % max(1, math.ceil(error.retry_after_s * 1000))))
    elif error.http_status == 503:
        added.append((b"retry-after", b"1"))
    added += [
        (name.encode(), value.encode())
        for name, value in error.metadata.items()
        if is_limit_header(name)
    ]
    if error.http_status in _REPEATED and not error.retryable:
        added.append((b"x-should-retry", b"false"))
    if isinstance(error, UnknownKey):
        added.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodNotAllowed):
        added.append((b"allow", error.allowed.encode()))
    return added
