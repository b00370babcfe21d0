"""What the admin API says where its framework refuses a request."""

import httpx
import pytest
from fastapi import FastAPI
from starlette.exceptions import HTTPException

from headrace_billing.admin_errors import add_errors


@pytest.mark.parametrize(
    ("status", "code"), [(404, "unknown_url"), (413, "invalid_request"), (503, "internal_error")]
)
async def test_each_refusal_keeps_its_own_status(status: int, code: str) -> None:
    """In the usual shape, without the framework's text, with its headers."""
    app = FastAPI()
    add_errors(app)

    @app.get("/")
    async def refuse() -> None:
        raise HTTPException(status, "from inside", {"x-why": "that"})

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://billing") as client:
        answer = await client.get("/")
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == code
    assert "inside" not in error["message"]
    assert (answer.headers.get("x-why") == "that") == (status != 404)
