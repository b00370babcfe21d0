"""anthropic: messages, streams, tools, counting, batches, errors."""

from __future__ import annotations

import os
import time

import anthropic

MODEL = os.environ["MODEL"]
client = anthropic.Anthropic(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"])
HELLO = [{"role": "user", "content": "Say hello."}]

answer = client.messages.create(model=MODEL, messages=HELLO, max_tokens=8)
assert answer.content[0].type == "text"
assert answer.stop_reason in ("max_tokens", "end_turn")
counted = client.messages.count_tokens(model=MODEL, messages=HELLO)
used = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
assert counted.input_tokens == used, (counted, answer.usage)

with client.messages.stream(model=MODEL, messages=HELLO, max_tokens=8) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == final.content[0].text

tool = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
    },
}
called = client.messages.create(
    model=MODEL,
    messages=HELLO,
    max_tokens=64,
    tools=[tool],
    tool_choice={"type": "tool", "name": "weather"},
)
use = next(block for block in called.content if block.type == "tool_use")
assert use.input["city"] in ("Paris", "Rome")

listed = [model.id for model in client.models.list(limit=1)]
assert MODEL in listed, listed
assert client.models.retrieve(MODEL).display_name == MODEL
beta = client.beta.messages.create(model=MODEL, messages=HELLO, max_tokens=4)
assert beta.content[0].type == "text"

asked = {"model": MODEL, "messages": HELLO, "max_tokens": 8}
batch = client.messages.batches.create(
    requests=[
        {"custom_id": "good", "params": asked},
        {"custom_id": "wrong", "params": {**asked, "model": "nobody"}},
    ]
)
while batch.processing_status != "ended":
    time.sleep(0.5)
    batch = client.messages.batches.retrieve(batch.id)
results = {it.custom_id: it.result for it in client.messages.batches.results(batch.id)}
assert results["good"].message.content[0].text
assert results["wrong"].error.error.type == "not_found_error", results
assert (batch.request_counts.succeeded, batch.request_counts.errored) == (1, 1)
assert batch.id in [it.id for it in client.messages.batches.list(limit=1)]
assert client.messages.batches.delete(batch.id).id == batch.id

try:
    client.messages.create(model="nobody", messages=HELLO, max_tokens=8)
except anthropic.NotFoundError as error:
    assert error.body["error"]["type"] == "not_found_error", error.body
    print("8 checks")
else:
    raise AssertionError("an unknown model was taken")
