"""The OpenAPI document is true: its examples are sent, its schemas are checked against them."""

from __future__ import annotations

from typing import Any

import jsonschema

from headrace_testing.gateway_fleet import GatewayFleet


async def test_every_example_is_answered(fleet: GatewayFleet) -> None:
    """Each fits its own schema and gets, from a running gateway, a 200 that fits the answer's."""
    async with fleet.http() as client:
        document: Any = (await client.get("/openapi.json")).json()
        assert document["openapi"].startswith("3.1")
        upload = await client.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", b"{}")}
        )
        num_sent = 0
        for path, operations in document["paths"].items():
            content = operations.get("post", {}).get("requestBody", {}).get("content", {})
            body = content.get("application/json", {})
            for example in body.get("examples", {}).values():
                schema = {**body["schema"], "components": document["components"]}
                jsonschema.validate(example["value"], schema)
                if "input_file_id" in example["value"]:
                    example["value"]["input_file_id"] = upload.json()["id"]
                response = await client.post(path, json=example["value"])
                assert response.status_code == 200, (path, example["summary"], response.text)
                if response.headers["content-type"].startswith("application/json"):
                    shown = operations["post"]["responses"]["200"]["content"]["application/json"]
                    schema = {**shown["schema"], "components": document["components"]}
                    jsonschema.validate(response.json(), schema)
                num_sent += 1
    assert num_sent >= 23


async def test_errors_have_the_documented_shape(fleet: GatewayFleet) -> None:
    """Each hot path refuses an empty object with an error as its schema says."""
    async with fleet.http() as client:
        document: Any = (await client.get("/openapi.json")).json()
        error = document["components"]["schemas"]["Error"]
        messages_error = document["components"]["schemas"]["MessagesError"]
        hot = [path for path, it in document["paths"].items() if "4XX" in str(it.get("post"))]
        assert {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"} <= set(hot)
        for path in hot:
            of_messages = path.startswith("/v1/messages")
            response = await client.post(path, json={})
            assert response.status_code == 400
            jsonschema.validate(response.json(), messages_error if of_messages else error)
