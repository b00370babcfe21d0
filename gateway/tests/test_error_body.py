"""Errors over HTTP."""

from __future__ import annotations

import json

import pytest

from headrace_common.errors import (
    BY_REASON,
    BudgetExhausted,
    HeadraceError,
    Internal,
    NoReplica,
    NotFound,
    RateLimited,
    UnknownKey,
)
from headrace_gateway import error_body


@pytest.mark.parametrize("cls", [*BY_REASON.values(), error_body.BodyTooLarge])
def test_every_error_has_the_public_shape(cls: type[HeadraceError]) -> None:
    """Message, type, param and code, for whatever can be raised."""
    error = cls() if cls is Internal else cls("what to do")
    body = json.loads(error_body.render(error, "req_1"))["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"]
    assert body["type"]
    assert body["code"]
    assert 400 <= cls.http_status < 600


def test_server_errors_name_the_request() -> None:
    """So that they can be reported; client errors need no number."""
    assert b"req_1" in error_body.render(Internal(), "req_1")
    assert b"req_1" not in error_body.render(UnknownKey("no"), "req_1")


def test_retry_after_is_rounded_up() -> None:
    """Who waits as told is not refused again for a fraction."""
    headers = dict(error_body.headers(RateLimited("x", retry_after_s=29.0001)))
    assert headers[b"retry-after"] == b"30"
    assert headers[b"retry-after-ms"] == b"29001"


def test_every_503_says_when_to_come_back() -> None:
    """Even if the cause does not know."""
    assert dict(error_body.headers(NoReplica("x")))[b"retry-after"] == b"1"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (BudgetExhausted("x"), b"false"),
        (error_body.IdempotencyConflict("x"), b"false"),
        (error_body.RequestInProgress("x"), None),
        (RateLimited("x"), None),
        (NoReplica("x"), None),
        (Internal(), None),
        (UnknownKey("x"), b"false"),
        (NotFound("x"), None),
    ],
)
def test_sdks_are_told_what_is_of_no_use(error: HeadraceError, told: bytes | None) -> None:
    """They repeat every 409 and 429 by themselves."""
    assert dict(error_body.headers(error)).get(b"x-should-retry") == told


def test_401_names_the_scheme() -> None:
    """As HTTP wants it."""
    assert (b"www-authenticate", b"Bearer") in error_body.headers(UnknownKey("x"))
