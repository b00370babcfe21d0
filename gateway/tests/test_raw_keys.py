"""Keys as they come on the wire, which client libraries would not send."""

from __future__ import annotations

import asyncio
import json

import pytest

from headrace_testing.gateway_fleet import GatewayFleet, chat_body

PATHS = [("POST", "/v1/chat/completions"), ("POST", "/v1/moderations"), ("GET", "/v1/models")]


async def answer_to(
    fleet: GatewayFleet, method: str, path: str, fields: bytes
) -> tuple[int, bytes, bytes]:
    """Send one request with exactly these fields; return status, head and body."""
    body = json.dumps(chat_body()).encode() if method == "POST" else b""
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n".encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", fleet.gateway.port)
    writer.write(b"%s%scontent-length: %d\r\n\r\n%s" % (head, fields, len(body), body))
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    head, _, told = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), head, told


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize(
    "fields",
    [
        b"",
        b"authorization:\r\n",
        b"Authorization: Bearer\r\n",
        b"Authorization: Bearer \r\n",
        b"Authorization: bearer  x\r\n",
        b"Authorization: Bearer\tx\r\n",
        b"Authorization: Basic dTpw\r\n",
        b"Authorization: Bearer%s\r\n",
        b"Authorization: Bearer \xc3\xa4\xff\x80\r\n",
        b"Authorization: Bearer x y\r\n",
        b"Authorization: Bearer " + b"x" * 4000 + b"\r\n",
        b"x-api-key:\r\n",
        b"x-api-key: \xff\r\n",
        b"Authorization: Bearer %s\r\nAuthorization: Bearer %s\r\n",
        b"Authorization: Bearer %s\r\nx-api-key:\r\nx-api-key: a\r\n",
    ],
)
async def test_what_is_no_key_is_refused_in_the_usual_shape(
    fleet: GatewayFleet, method: str, path: str, fields: bytes
) -> None:
    """401, JSON, and nothing of what was sent is told back."""
    key = fleet.api_key.encode()
    status, head, body = await answer_to(fleet, method, path, fields.replace(b"%s", key))
    assert status == 401
    assert b"content-type: application/json" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert key not in body
    assert fleet.worker.requests == []


@pytest.mark.parametrize(
    "fields",
    [
        b"Authorization: Bearer %s\r\n",
        b"AUTHORIZATION: bearer   %s  \r\n",
        b"x-api-key: %s\r\n",
        b"authorization: BEARER %s\r\nx-api-key: other\r\n",
    ],
)
async def test_a_key_is_found_however_it_is_written(fleet: GatewayFleet, fields: bytes) -> None:
    """Names and the scheme in any case, blanks around the key; `authorization` goes first."""
    given = fields.replace(b"%s", fleet.api_key.encode())
    status, _, _ = await answer_to(fleet, "GET", "/v1/models", given)
    assert status == 200
