"""Every kind of answer, read strictly as the types of openai and anthropic: no field is amiss.

The packages themselves read leniently: what is missing is None there, and found out much later.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import anthropic.types as theirs
import httpx
import openai.types as ours
from openai.types import chat, responses, uploads
from pydantic import TypeAdapter, ValidationError

MODEL = os.environ["MODEL"]
http = httpx.Client(
    base_url=os.environ["BASE_URL"],
    headers={"authorization": f"Bearer {os.environ['API_KEY']}"},
    timeout=300,
)
faults: list[str] = []
kinds: set[str] = set()
SAY = [{"role": "user", "content": "Say hello."}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "f", "parameters": SCHEMA}
WORD = {"syntax": "regex", "definition": "[a-z]{2,5}"}
# OpenAI's own answers hold these nulls too, where its package's types say a value.
NULLS = ("finish_reason", "token_logprobs", "top_logprobs")


def check(what: str, kind: Any, value: Any) -> None:
    """Note where a value is not of the type."""
    kinds.add(what)
    try:
        TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        faults.extend(
            f"{what}: {fault['loc']} {fault['msg']}"
            for fault in error.errors()
            if not (fault["input"] is None and any(it in NULLS for it in fault["loc"]))
        )


def sent(path: str, body: dict[str, Any]) -> httpx.Response:
    """Return an answer, after some tries as the packages make them where a server is busy."""
    for _ in range(5):
        answer = http.post(path, json=body)
        if answer.status_code != 503:
            break
        time.sleep(float(answer.headers.get("retry-after", 1)))
    return answer.raise_for_status()


def events(path: str, body: dict[str, Any]) -> list[Any]:
    """Return the events of a stream."""
    lines = sent(path, body | {"stream": True}).text.split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def post(path: str, kind: Any, **body: Any) -> None:
    """Ask, and check the answer."""
    check(f"{path} {sorted(body)}", kind, sent(path, body).json())


def both(path: str, whole: Any, event: Any, asked: dict[str, Any], cases: list[Any]) -> None:
    """Check answers of each case, whole and streamed."""
    for fields in cases:
        post(path, whole, **asked, **fields)
        for it in events(path, asked | fields):
            check(f"{path} {sorted(fields)} {it.get('type', 'chunk')}", event, it)


tool = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
asked: dict[str, Any] = {"model": MODEL, "messages": SAY, "max_tokens": 24}
both(
    "/v1/chat/completions",
    chat.ChatCompletion,
    chat.ChatCompletionChunk,
    asked,
    [{}, {"logprobs": True, "top_logprobs": 2}, {"n": 2}, tool, {"service_tier": "default"}],
)
both(
    "/v1/completions",
    ours.Completion,
    ours.Completion,
    {"model": MODEL, "prompt": "One, two", "max_tokens": 4},
    [{}, {"logprobs": 2}, {"echo": True, "logprobs": 1}],
)
custom = {"type": "custom", "name": "c", "format": {"type": "grammar", **WORD}}
namespace = {"type": "namespace", "name": "n", "description": "d"}
function = {"type": "function", **FUNCTION}
fields: list[Any] = [
    {},
    {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    {"tools": [function], "tool_choice": "required"},
    {"tools": [namespace | {"tools": [function]}], "tool_choice": "required"},
    {"tools": [custom], "tool_choice": {"type": "custom", "name": "c"}},
    {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}},
    {"instructions": "Be brief.", "reasoning": {"effort": "low"}, "metadata": {"a": "b"}},
    {"background": True},
]
asked = {"model": MODEL, "input": "Say hello.", "max_output_tokens": 24}
both("/v1/responses", responses.Response, responses.ResponseStreamEvent, asked, fields)
for case in fields:
    told = events("/v1/responses", asked | case)
    assert told[-1]["type"] in ("response.completed", "response.incomplete"), told[-1]
    assert [it["sequence_number"] for it in told] == list(range(len(told))), told
    made = told[-1]["response"]["id"]
    for path, kind in (("", responses.Response), ("/input_items", responses.ResponseItemList)):
        check(f"kept{path}", kind, http.get(f"/v1/responses/{made}{path}").json())

post("/v1/embeddings", ours.CreateEmbeddingResponse, model=MODEL, input=["one", "two"])
post("/v1/moderations", ours.ModerationCreateResponse, input="hello")
for model in http.get("/v1/models").json()["data"]:
    check("model", ours.Model, model)
    as_theirs = http.get(f"/v1/models/{model['id']}", headers={"anthropic-version": "2023-06-01"})
    check("their model", theirs.ModelInfo, as_theirs.json())
line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
line |= {"body": {"model": MODEL, "prompt": "One", "max_tokens": 2}}
upload = {"files": {"file": ("a.jsonl", json.dumps(line))}, "data": {"purpose": "batch"}}
file = http.post("/v1/files", **upload).raise_for_status().json()
check("file", ours.FileObject, file)
announced = {"bytes": 2, "filename": "a", "mime_type": "text/plain", "purpose": "batch"}
for end in ("complete", "cancel"):
    begun = sent("/v1/uploads", announced).json()
    check("begun upload", ours.Upload, begun)
    path = f"/v1/uploads/{begun['id']}"
    part = http.post(f"{path}/parts", files={"data": b"ab"}).raise_for_status().json()
    check("part", uploads.UploadPart, part)
    body = {"json": {"part_ids": [part["id"]]}} if end == "complete" else {}
    done = http.post(f"{path}/{end}", **body).raise_for_status().json()
    check(f"upload after {end}", ours.Upload, done)
batch = {"input_file_id": file["id"], "endpoint": line["url"], "completion_window": "24h"}
post("/v1/batches", ours.Batch, **batch)
check("deleted", ours.FileDeleted, http.delete(f"/v1/files/{file['id']}").json())

tool = {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}}
form = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
asked = {"model": MODEL, "messages": SAY, "max_tokens": 24}
path = "/v1/messages"
for case in ({}, tool, {"stop_sequences": ["o"]}, {"system": "Be brief."}, form):
    post(path, theirs.Message, **asked, **case)
    for it in events(path, asked | case):
        if it["type"] != "ping":
            check(f"{path} {sorted(case)} {it['type']}", theirs.RawMessageStreamEvent, it)
post(f"{path}/count_tokens", theirs.MessageTokensCount, model=MODEL, messages=SAY)
wrong = {"custom_id": "b", "params": asked | {"model": "nobody"}}
requests = [{"custom_id": "a", "params": asked}, wrong]
made = sent(f"{path}/batches", {"requests": requests}).json()
while made["results_url"] is None:
    check("begun batch", theirs.messages.MessageBatch, made)
    time.sleep(0.5)
    made = http.get(f"{path}/batches/{made['id']}").json()
check("ended batch", theirs.messages.MessageBatch, made)
for result in http.get(made["results_url"]).text.splitlines():
    result = json.loads(result)
    kind = f"result {result['result']['type']}"
    check(kind, theirs.messages.MessageBatchIndividualResponse, result)
deleted = http.delete(f"{path}/batches/{made['id']}").json()
check("deleted batch", theirs.messages.DeletedMessageBatch, deleted)

assert not faults, "\n".join(faults)
print(f"{len(kinds)} kinds of answers and events")
