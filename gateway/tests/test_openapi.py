"""The OpenAPI document is true: its examples are sent, its schemas are checked against them."""

from __future__ import annotations

from typing import Any

import jsonschema

from headrace_testing.fake_worker import MODEL
from headrace_testing.gateway_fleet import GatewayFleet
from headrace_testing.waiting import eventually


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
    assert num_sent >= 25


async def test_errors_have_the_documented_shape(fleet: GatewayFleet) -> None:
    """Each hot path refuses an empty object with an error as its schema says."""
    async with fleet.http() as client:
        document: Any = (await client.get("/openapi.json")).json()
        error = document["components"]["schemas"]["Error"]
        messages_error = document["components"]["schemas"]["MessagesError"]
        hot = [
            path
            for path, it in document["paths"].items()
            if "application/json" in it.get("post", {}).get("requestBody", {}).get("content", {})
        ]
        assert {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"} <= set(hot)
        for path in hot:
            of_messages = path.startswith("/v1/messages")
            response = await client.post(path, json={})
            assert response.status_code == 400
            jsonschema.validate(response.json(), messages_error if of_messages else error)


async def test_answers_of_fastapis_routes_are_as_documented(fleet: GatewayFleet) -> None:
    """Lists, objects and their errors fit their schemas; errors of FastAPI's own are not shown."""
    async with fleet.http() as client:
        document: Any = (await client.get("/openapi.json")).json()
        file = (
            await client.post(
                "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", b"{}")}
            )
        ).json()
        asked = {
            "input_file_id": file["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        batch = (await client.post("/v1/batches", json=asked)).json()
        params = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
        asked = {"requests": [{"custom_id": "a", "params": params}]}
        message_batch = (await client.post("/v1/messages/batches", json=asked)).json()
        path = f"/v1/messages/batches/{message_batch['id']}"

        async def has_results() -> Any:
            return (await client.get(path)).json()["results_url"]

        await eventually(has_results)
        made = {"model": MODEL, "input": "hi"}
        response = (await client.post("/v1/responses", json=made)).json()
        known = {
            "file_id": file["id"],
            "batch_id": batch["id"],
            "message_batch_id": message_batch["id"],
            "response_id": response["id"],
            "model": MODEL,
            "request_id": response["id"].replace("resp_", "req_"),
        }
        num_seen = 0
        for path, operations in document["paths"].items():
            assert not any("422" in it["responses"] for it in operations.values()), path
            if "get" not in operations or path.endswith("/content") or "admin" in path:
                continue
            answer = await client.get(path.format(**known))
            assert answer.status_code == 200, (path, answer.text)
            shown = operations["get"]["responses"]["200"]["content"]
            kind = answer.headers["content-type"].partition(";")[0]
            if kind == "application/json":
                schema = {**shown[kind]["schema"], "components": document["components"]}
                jsonschema.validate(answer.json(), schema)
            assert kind in shown, path
            num_seen += 1
        assert num_seen >= 16
        error = {**document["components"]["schemas"]["Error"]}
        for path in ("/v1/files/none", "/v1/batches/none", "/v1/usage?limit=0", "/v1/models/none"):
            jsonschema.validate((await client.get(path)).json(), error)
