"""openai, 2.x and 3.x: chat, streams, completions, responses, embeddings, models, errors."""

from __future__ import annotations

import json
import os
import re

import openai

MODEL = os.environ["MODEL"]
client = openai.OpenAI(base_url=os.environ["BASE_URL"] + "/v1", api_key=os.environ["API_KEY"])
HELLO = [{"role": "user", "content": "Say hello."}]

answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=8, temperature=0)
assert answer.choices[0].message.role == "assistant"
assert answer.choices[0].message.content
assert answer.usage.completion_tokens <= 8
assert answer._request_id

stream = client.chat.completions.create(
    model=MODEL,
    messages=HELLO,
    max_tokens=8,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
chunks = list(stream)
text = "".join(it.choices[0].delta.content or "" for it in chunks if it.choices)
assert text == answer.choices[0].message.content, (text, answer)
assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens

with client.chat.completions.stream(model=MODEL, messages=HELLO, max_tokens=4) as events:
    kinds = [event.type for event in events]
assert "content.delta" in kinds, kinds

tool = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
called = client.chat.completions.create(
    model=MODEL, messages=HELLO, tools=[tool], tool_choice="required", max_tokens=64
)
call = called.choices[0].message.tool_calls[0]
assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")

word = {"type": "grammar", "grammar": {"syntax": "regex", "definition": r"[a-z]{3,9}"}}
called = client.chat.completions.create(
    model=MODEL,
    messages=HELLO,
    tools=[{"type": "custom", "custom": {"name": "say", "format": word}}],
    tool_choice={"type": "custom", "custom": {"name": "say"}},
    max_tokens=64,
)
call = called.choices[0].message.tool_calls[0]
assert (call.type, called.choices[0].finish_reason) == ("custom", "tool_calls"), called
assert re.fullmatch("[a-z]{3,9}", call.custom.input), call

lines = {"type": "grammar", "syntax": "lark", "definition": 'start: ("+" /[a-z]{3,9}/ "\\n"){2}'}
events = list(
    client.responses.create(
        model=MODEL,
        input="Add two lines.",
        tools=[{"type": "custom", "name": "edit", "format": lines}],
        tool_choice={"type": "custom", "name": "edit"},
        max_output_tokens=64,
        stream=True,
    )
)
deltas = [it.delta for it in events if it.type == "response.custom_tool_call_input.delta"]
(item,) = events[-1].response.output
assert item.input == "".join(deltas), events
assert re.fullmatch(r"(\+[a-z]{3,9}\n){2}", item.input), item

completion = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=4, logprobs=2)
assert len(completion.choices[0].logprobs.tokens) == completion.usage.completion_tokens

response = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=16)
assert response.output_text
assert client.responses.retrieve(response.id).output_text == response.output_text
kinds = [
    event.type
    for event in client.responses.create(model=MODEL, input="Hi", max_output_tokens=16, stream=True)
]
assert (kinds[0], kinds[-1]) == ("response.created", "response.incomplete") or (
    kinds[-1] == "response.completed"
), kinds

vectors = client.embeddings.create(model=MODEL, input=["one", "two"])
assert len(vectors.data) == 2
assert MODEL in [it.id for it in client.models.list()]

content = b'{"custom_id": "a"}\n' * 100_000
upload = client.uploads.upload_file_chunked(
    file=content,
    filename="a.jsonl",
    bytes=len(content),
    mime_type="application/jsonl",
    purpose="batch",
    part_size=700_000,
)
assert upload.file.bytes == len(content), upload
assert client.files.content(upload.file.id).content == content
client.files.delete(upload.file.id)

for wrong, kind in (
    ({"temperature": 9}, openai.BadRequestError),
    ({"model": "nobody"}, openai.NotFoundError),
):
    try:
        client.chat.completions.create(**{"model": MODEL, "messages": HELLO, **wrong})
    except kind as error:
        assert error.param, error
    else:
        raise AssertionError(f"{wrong} was taken")
try:
    client.with_options(api_key="sk-wrong").models.list()
except openai.AuthenticationError:
    print("15 checks")
else:
    raise AssertionError("a wrong key was taken")
