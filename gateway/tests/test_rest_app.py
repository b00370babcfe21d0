"""What FastAPI's routes say where the framework itself refuses a request."""

from __future__ import annotations

from typing import Any, cast

import httpx
import pytest
from fastapi import APIRouter
from starlette.exceptions import HTTPException

from headrace_gateway.auth import KeyAuth
from headrace_gateway.call_rate import CallRate
from headrace_gateway.rest_app import rest_app
from headrace_testing.clock import FakeClock


@pytest.mark.parametrize(
    ("status", "code"), [(404, "unknown_url"), (413, "invalid_request"), (503, "internal_error")]
)
async def test_each_refusal_keeps_its_own_status(status: int, code: str) -> None:
    """In the usual shape, without the framework's text, with its headers."""
    router = APIRouter()

    @router.get("/x")
    async def refuse() -> None:
        raise HTTPException(status, "from inside", {"x-why": "that"})

    # Outside /v1/ no key is asked for.
    app = rest_app([router], (), cast(KeyAuth, None), cast(CallRate, None), FakeClock())
    # Any: httpx's idea of an application is another than ours.
    transport = httpx.ASGITransport(cast(Any, app))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        answer = await client.get("/x")
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == code
    assert "inside" not in error["message"]
    assert (answer.headers.get("x-why") == "that") == (status != 404)
