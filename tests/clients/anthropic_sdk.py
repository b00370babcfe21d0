"""anthropic: messages, streams, tools, counting, errors."""

from __future__ import annotations

import os

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

try:
    client.messages.create(model="nobody", messages=HELLO, max_tokens=8)
except anthropic.NotFoundError as error:
    assert error.body["error"]["type"] == "not_found_error", error.body
    print("7 checks")
else:
    raise AssertionError("an unknown model was taken")
