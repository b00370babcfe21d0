"""What surrounds every endpoint: methods, query parameters, pages, other origins."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httpx
import pytest

from headrace_contracts.ratelimit.v1.ratelimit_pb2 import Limits
from headrace_testing.fake_worker import MODEL
from headrace_testing.gateway_fleet import GatewayFleet, chat_body

PAGE = "https://app.example.com"
ANTHROPIC = {"anthropic-version": "2023-06-01"}


@pytest.mark.parametrize(
    ("url", "param"),
    [
        ("POST /v1/chat/completions?api-version=1", "api-version"),
        ("POST /v1/chat/completions?beta=true", "beta"),
        ("POST /v1/embeddings?x", "x"),
        ("POST /tokenize?model=m", "model"),
        ("POST /v1/messages?beta=true&beta=true", "beta"),
        ("GET /v1/models?page=2", "page"),
        ("GET /v1/models?limit=2", "limit"),
        ("GET /v1/files?before=file-1", "before"),
        ("GET /v1/files?limit=1&limit=2", "limit"),
        ("GET /v1/batches?order=asc", "order"),
        ("GET /v1/batches?limit=0", "limit"),
        ("GET /v1/batches?limit=x", "limit"),
        ("GET /v1/responses/resp_1?include[]=reasoning.encrypted_content", "include"),
        ("GET /v1/responses/resp_1/input_items?order=up", "order"),
        ("GET /v1/usage?bucket_width=1d", "bucket_width"),
        ("GET /v1/requests/req_1?verbose=1", "verbose"),
    ],
)
async def test_query_parameters_are_refused_by_name(
    fleet: GatewayFleet, url: str, param: str
) -> None:
    """What is unknown, given twice or out of bounds gets a 400 that names it."""
    method, path = url.split(" ")
    async with fleet.http() as client:
        response = await client.request(method, path, json=chat_body())
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    if path.startswith("/v1/messages"):
        assert param in error["message"]
    else:
        assert error["param"] == param
    assert fleet.worker.requests == []


async def test_known_query_parameters_and_probes_pass(fleet: GatewayFleet) -> None:
    """The beta mark of Anthropic's SDK is taken, and a probe may add what it likes."""
    async with fleet.http() as client:
        beta = await client.post("/v1/messages?beta=true", json=chat_body())
        probe = await client.get("/health?from=lb")
    assert (beta.status_code, probe.status_code) == (200, 200)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("HEAD", "/v1/responses", "POST"),
        ("PUT", "/v1/batches", "GET, HEAD, POST"),
        ("PATCH", "/v1/files/file-1", "DELETE, GET, HEAD"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("PUT", "/v1/responses/resp_1", "DELETE, GET, HEAD"),
        ("OPTIONS", "/v1/embeddings", "POST"),
    ],
)
async def test_a_wrong_method_is_told_the_right_ones(
    fleet: GatewayFleet, method: str, path: str, allowed: str
) -> None:
    """405 with Allow, in the usual shape."""
    async with fleet.http() as client:
        response = await client.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"] == allowed
    if method != "HEAD":
        assert response.json()["error"]["code"] == "method_not_allowed"


def _raw_head(fleet: GatewayFleet, path: str) -> bytes:
    """Send HEAD and return all that comes; an HTTP client would hide a body."""
    request = f"HEAD {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {fleet.api_key}\r\n"
    with socket.create_connection(("127.0.0.1", fleet.gateway.port), timeout=10) as connection:
        connection.sendall((request + "connection: close\r\n\r\n").encode())
        received = b""
        while piece := connection.recv(65536):
            received += piece
    return received


async def test_a_slash_too_many_is_another_url(fleet: GatewayFleet) -> None:
    """Unknown, as at OpenAI; nobody is sent elsewhere."""
    async with fleet.http() as client:
        for url in ("/v1/files/", "/v1/batches/", "/v1/usage/"):
            answer = await client.get(url)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url"), url


async def test_head_is_get_without_the_body(fleet: GatewayFleet) -> None:
    """Same status and headers as GET, and nothing behind them."""
    async with fleet.http() as client:
        whole = await client.get("/v1/models")
    for path, status in (("/v1/models", 200), ("/health", 200), ("/v1/files/none", 404)):
        head, _, body = (await asyncio.to_thread(_raw_head, fleet, path)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d" % status)
        assert body == b""
        if path == "/v1/models":
            assert b"content-length: %d" % len(whole.content) in head


async def test_no_origin_is_allowed_by_default(fleet: GatewayFleet) -> None:
    """Without the setting, a browser is told nothing that would let a page read answers."""
    async with fleet.http() as client:
        asked = {"origin": PAGE, "access-control-request-method": "POST"}
        preflight = await client.options("/v1/chat/completions", headers=asked)
        answer = await client.get("/v1/models", headers={"origin": PAGE})
    assert preflight.status_code == 405
    for response in (preflight, answer):
        assert not any(name.startswith("access-control") for name in response.headers)


@pytest.fixture
async def open_fleet(fleet_parts: GatewayFleet) -> Any:
    """A fleet that one origin may call."""
    fleet_parts.settings = {"cors_origins": f"{PAGE}, http://localhost:3000"}
    await fleet_parts.start()
    yield fleet_parts
    await fleet_parts.close()


async def test_an_allowed_page_gets_preflights_answers_and_errors(open_fleet: GatewayFleet) -> None:
    """It may read whole answers, streams, refusals and those of FastAPI, and their headers."""
    asked = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type, x-stainless-os",
    }
    own = {"origin": PAGE}
    async with open_fleet.http("") as stranger, open_fleet.http() as client:
        preflight = await stranger.options("/v1/chat/completions", headers=asked)
        answers = [
            await client.post("/v1/chat/completions", json=chat_body(), headers=own),
            await client.post("/v1/chat/completions", json=chat_body(stream=True), headers=own),
            await client.post("/v1/chat/completions", json={}, headers=own),
            await stranger.post("/v1/chat/completions", json=chat_body(), headers=own),
            await client.get("/v1/models", headers=own),
            await client.get("/v1/nowhere", headers=own),
        ]
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-headers"].startswith("authorization")
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert [answer.status_code for answer in answers] == [200, 200, 400, 401, 200, 404]
    for response in (preflight, *answers):
        assert response.headers["access-control-allow-origin"] == PAGE
        assert response.headers["vary"] == "origin"
        assert "access-control-allow-credentials" not in response.headers
    for response in answers:
        assert "x-request-id" in response.headers["access-control-expose-headers"]


async def test_a_page_from_elsewhere_is_not_allowed(open_fleet: GatewayFleet) -> None:
    """Its preflight allows nothing; caches are told that the answer depends on the origin."""
    own = {"origin": "https://evil.example.com", "access-control-request-method": "POST"}
    async with open_fleet.http() as client:
        preflight = await client.options("/v1/chat/completions", headers=own)
        answer = await client.get("/v1/models", headers=own)
    for response in (preflight, answer):
        assert "access-control-allow-origin" not in response.headers
        assert response.headers["vary"] == "origin"


async def test_anthropics_sdk_lists_models(fleet: GatewayFleet) -> None:
    """In its shapes and pages; what is not there is told in its error shape."""
    async with fleet.anthropic() as client:
        models = [model async for model in client.models.list(limit=1)]
        one = await client.models.retrieve(MODEL)
    assert [model.id for model in models] == [one.id] == [MODEL]
    assert (one.type, one.lifecycle) == ("model", "active")
    async with fleet.http() as http:
        back = await http.get("/v1/models", params={"before_id": MODEL}, headers=ANTHROPIC)
        wrong = await http.get("/v1/models", params={"after_id": "x"}, headers=ANTHROPIC)
        missing = await http.get("/v1/models/x", headers=ANTHROPIC)
    assert back.json() == {"data": [], "first_id": None, "last_id": None, "has_more": False}
    for response in (wrong, missing):
        assert response.status_code == 404
        _check_messages_error(response, "not_found_error")


@pytest.mark.parametrize("coding", ["", "identity", "Identity"])
async def test_a_body_may_say_that_it_is_not_compressed(fleet: GatewayFleet, coding: str) -> None:
    """Names of codings have no case (RFC 9110, 8.4.1)."""
    async with fleet.http() as client:
        headers = {"content-encoding": coding}
        response = await client.post("/v1/chat/completions", json=chat_body(), headers=headers)
    assert response.status_code == 200


async def test_every_refusal_of_messages_has_anthropics_shape(fleet: GatewayFleet) -> None:
    """Whatever stage refuses: the key, the method, the body's size, its form, the model."""
    body = chat_body()
    async with fleet.http("sk-wrong") as stranger, fleet.http() as client:
        refusals = {
            "authentication_error": [await stranger.post("/v1/messages", json=body)],
            "not_found_error": [
                await client.post("/v1/messages", json={**body, "model": "none"}),
                await client.get("/v1/messages/batches/x"),
            ],
            "request_too_large": [await client.post("/v1/messages", content=b" " * (11 * 2**20))],
            "invalid_request_error": [
                await client.get("/v1/messages"),
                await client.post("/v1/messages", content=b"{"),
                await client.post("/v1/messages?x=1", json=body),
                await client.post("/v1/messages", json=body, headers={"content-encoding": "gzip"}),
                await client.post("/v1/messages", json=body, headers={"anthropic-version": "x"}),
            ],
        }
        once = {"idempotency-key": "k1"}
        assert (await client.post("/v1/messages", json=body, headers=once)).status_code == 200
        again = await client.post("/v1/messages", json={**body, "max_tokens": 9}, headers=once)
        assert again.status_code == 409
        refusals["invalid_request_error"].append(again)
    for kind, responses in refusals.items():
        for response in responses:
            assert response.status_code >= 400
            _check_messages_error(response, kind)


def _check_messages_error(response: httpx.Response, kind: str) -> None:
    body = response.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == kind, response.text
    assert body["request_id"] == response.headers["request-id"]


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/moderations", {"input": "x"}),
    ("/tokenize", {"model": MODEL, "prompt": "x"}),
    ("/detokenize", {"model": MODEL, "tokens": [1]}),
    ("/v1/responses/input_tokens", {"model": MODEL, "input": "x"}),
    ("/v1/messages/count_tokens", {"model": MODEL, "messages": chat_body()["messages"]}),
]


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_calls_that_generate_nothing_are_limited_too(
    fleet: GatewayFleet, path: str, body: dict[str, Any]
) -> None:
    """A key for usage alone may not make them, and each counts as a request of its key's."""
    meter, _ = fleet.new_key(scopes=["usage"])
    seldom, _ = fleet.new_key(limits=Limits(requests_per_minute=1))
    async with fleet.http(meter) as other, fleet.http(seldom) as client:
        assert (await other.post(path, json=body)).status_code == 403
        first, second = await client.post(path, json=body), await client.post(path, json=body)
    assert (first.status_code, second.status_code) == (200, 429)
    assert first.headers["x-ratelimit-remaining-requests"] == "0"
    await fleet.settled()
