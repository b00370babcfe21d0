"""The endpoints beside generation: each documented field is honoured, or refused by its name.

A field that a later SDK adds makes `test_the_lists_are_whole` fail until it stands in a list.
"""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types.model_list_params import ModelListParams
from openai.types.batch_create_params import BatchCreateParams
from openai.types.batch_list_params import BatchListParams
from openai.types.embedding_create_params import EmbeddingCreateParams
from openai.types.file_create_params import FileCreateParams
from openai.types.file_list_params import FileListParams
from openai.types.moderation_create_params import ModerationCreateParams
from openai.types.responses.input_item_list_params import InputItemListParams
from openai.types.responses.response_retrieve_params import ResponseRetrieveParamsBase

from headrace_testing.fake_worker import MODEL
from headrace_testing.gateway_fleet import GatewayFleet
from headrace_testing.waiting import eventually

URL = "/v1/chat/completions"
LINE = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"%s","messages":[{"role":"user","content":"hi"}],"max_tokens":2}}'  # noqa: E501 - a line of a file
# What each endpoint honours; the tests below and those of each endpoint show how.
HONOURED: dict[Any, set[str]] = {
    EmbeddingCreateParams: {"input", "model", "dimensions", "encoding_format", "user"},
    ModerationCreateParams: {"input", "model"},
    BatchCreateParams: {
        *("completion_window", "endpoint", "input_file_id", "metadata", "output_expires_after"),
    },
    BatchListParams: {"after", "limit"},
    FileCreateParams: {"file", "purpose", "expires_after"},
    FileListParams: {"after", "limit", "order", "purpose"},
    InputItemListParams: {"after", "limit", "order"},
    ResponseRetrieveParamsBase: {"starting_after"},
    ModelListParams: {"after_id", "before_id", "limit"},
}
# A request that must be refused for the field, and by its name.
REFUSED: dict[Any, dict[str, str]] = {
    InputItemListParams: {"include": "/v1/responses/resp_1/input_items?include[]=x"},
    ResponseRetrieveParamsBase: {
        "include": "/v1/responses/resp_1?include[]=x",
        "include_obfuscation": "/v1/responses/resp_1?include_obfuscation=true",
    },
    ModelListParams: {
        "lifecycle": "/v1/models?lifecycle=active",
        "workspace_id": "/v1/models?workspace_id=w",
    },
}


def test_the_lists_are_whole() -> None:
    """No field of these endpoints is in neither list, and none is in both."""
    for params, honoured in HONOURED.items():
        refused = set(REFUSED.get(params, {}))
        assert honoured | refused == set(params.__annotations__), params
        assert not honoured & refused


@pytest.mark.parametrize("params", REFUSED)
async def test_what_is_not_honoured_is_refused_by_name(fleet: GatewayFleet, params: Any) -> None:
    """400, and `param` says which."""
    async with fleet.http() as client:
        for name, url in REFUSED[params].items():
            response = await client.get(url)
            assert response.status_code == 400, url
            assert response.json()["error"]["param"] == name


async def test_results_expire_when_their_batch_says_so(fleet: GatewayFleet) -> None:
    """output_expires_after counts from the file's making; out of bounds it is refused by name."""
    async with fleet.http() as client, fleet.openai() as sdk:
        made = await sdk.files.create(file=("in.jsonl", LINE % MODEL.encode()), purpose="batch")
        asked = {"input_file_id": made.id, "endpoint": URL, "completion_window": "24h"}
        for seconds in (3599, 30 * 86_400 + 1):
            expiry = {"anchor": "created_at", "seconds": seconds}
            wrong = await client.post("/v1/batches", json={**asked, "output_expires_after": expiry})
            assert wrong.status_code == 400
            assert wrong.json()["error"]["param"] == "output_expires_after.seconds"
        expiry = {"anchor": "created_at", "seconds": 7200}
        begun = await client.post("/v1/batches", json={**asked, "output_expires_after": expiry})
        assert set(begun.json()) == set((await client.get("/v1/batches")).json()["data"][0])

        async def output() -> Any:
            batch = await sdk.batches.retrieve(begun.json()["id"])
            assert batch.output_file_id
            return await sdk.files.retrieve(batch.output_file_id)

        file = await eventually(output, within_s=20, every_s=0.1)
        assert file.expires_at - file.created_at == 7200


async def test_pages_of_files_and_batches_go_on(fleet: GatewayFleet) -> None:
    """The SDK walks a list page by page, both ways round, and meets each item once."""
    async with fleet.openai() as sdk:
        ids = []
        for _ in range(5):
            made = await sdk.files.create(file=("in.jsonl", LINE % MODEL.encode()), purpose="batch")
            ids.append(made.id)
        for order, expected in (("asc", ids), ("desc", ids[::-1])):
            walked = [
                file.id async for file in sdk.files.list(limit=2, order=order, purpose="batch")
            ]
            assert walked == expected
        begun = [
            (
                await sdk.batches.create(
                    input_file_id=ids[0], endpoint=URL, completion_window="24h"
                )
            ).id
            for _ in range(3)
        ]
        assert [batch.id async for batch in sdk.batches.list(limit=2)] == begun[::-1]
        second = await sdk.batches.list(limit=1, after=begun[-1])
        assert [batch.id for batch in second.data] == [begun[1]]
        assert second.has_more


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("tools", {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("chat_template_kwargs", {"prompt": "a", "chat_template_kwargs": {"x": 1}}),
        (
            "add_special_tokens",
            {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True},
        ),
        ("add_generation_prompt", {"prompt": "a", "add_generation_prompt": False}),
        ("chat_template", {"prompt": "a", "chat_template": "x"}),
    ],
)
async def test_tokenize_passes_nothing_over(
    fleet: GatewayFleet, field: str, body: dict[str, Any]
) -> None:
    """What has no meaning beside what is given, or none here, is refused by name."""
    async with fleet.http() as client:
        response = await client.post("/tokenize", json={"model": MODEL, **body})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
