"""Examples in the OpenAPI document; a test sends every one of them to a running gateway."""

from __future__ import annotations

from typing import Any

# JSON. Any: nested values.
Json = dict[str, Any]

_MODEL = "smollm2-135m-instruct"
_ASK = [{"role": "user", "content": "What is a headrace?"}]
_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
_PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "people": {"type": "integer", "minimum": 0}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


def _chat(summary: str, messages: list[Json] | None = None, **fields: Any) -> Json:
    body = {"model": _MODEL, "messages": messages or _ASK, "max_tokens": 64, **fields}
    return {"summary": summary, "value": body}


def _completion(summary: str, **fields: Any) -> Json:
    return {"summary": summary, "value": {"model": _MODEL, "max_tokens": 32, **fields}}


def _plain(summary: str, **fields: Any) -> Json:
    return {"summary": summary, "value": {"model": _MODEL, **fields}}


EXAMPLES: dict[str, dict[str, Json]] = {
    "/v1/chat/completions": {
        "whole": _chat("An answer at once"),
        "stream": _chat(
            "A stream, with the usage at its end",
            stream=True,
            stream_options={"include_usage": True},
        ),
        "sampling": _chat(
            "Three choices that can be had again",
            n=3,
            seed=7,
            temperature=0.8,
            top_p=0.95,
            logprobs=True,
            top_logprobs=2,
        ),
        "tools": _chat("Functions that the model may call", tools=[_WEATHER]),
        "tool_result": _chat(
            "The result of a call goes back",
            [
                {"role": "user", "content": "Weather in Bonn?"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"city": "Bonn"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "It rains."},
            ],
            tools=[_WEATHER],
        ),
        "schema": _chat(
            "JSON that obeys a schema",
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "place", "strict": True, "schema": _PLACE},
            },
        ),
        "choice": _chat("One of two words", structured_outputs={"choice": ["yes", "no"]}),
    },
    "/v1/completions": {
        "whole": _completion("A text goes on", prompt="A headrace is"),
        "many": _completion("Several prompts at once", prompt=["One", "Two"], stream=True),
        "echo": _completion(
            "Log probabilities of a text",
            prompt="A headrace is a channel.",
            echo=True,
            logprobs=1,
            max_tokens=0,
        ),
    },
    "/tokenize": {
        "prompt": {"summary": "A text", "value": {"model": _MODEL, "prompt": "Hello"}},
        "messages": {"summary": "A conversation", "value": {"model": _MODEL, "messages": _ASK}},
    },
    "/detokenize": {
        "ids": {"summary": "Ids to text", "value": {"model": _MODEL, "tokens": [72, 105]}},
    },
    "/v1/messages": {
        "whole": _plain(
            "An answer at once", messages=_ASK, max_tokens=64, system="Answer in one sentence."
        ),
        "stream": _plain("A stream", messages=_ASK, max_tokens=64, stream=True),
        "tools": _plain(
            "A tool that the model may use",
            messages=_ASK,
            max_tokens=64,
            tools=[
                {
                    "name": "weather",
                    "description": "Tells the weather of a city.",
                    "input_schema": _PLACE,
                }
            ],
        ),
    },
    "/v1/messages/count_tokens": {"count": _plain("The length of a prompt", messages=_ASK)},
    "/v1/responses": {
        "whole": _plain("A response that is kept", input="What is a headrace?"),
        "stream": _plain(
            "A stream that is not kept",
            input=_ASK,
            instructions="Answer in one sentence.",
            stream=True,
            store=False,
            max_output_tokens=64,
        ),
        "background": _plain("Made in the background", input="Count to ten.", background=True),
    },
    "/v1/responses/input_tokens": {
        "count": _plain("The length of a prompt", input="What is a headrace?")
    },
    "/v1/embeddings": {
        "texts": _plain("Two texts", input=["A headrace", "A channel"], encoding_format="float"),
        "base64": _plain("As packed numbers", input="A headrace", encoding_format="base64"),
    },
    "/v1/moderations": {
        "text": {"summary": "One text", "value": {"input": "How do I get home?"}},
        "parts": {
            "summary": "Several, each judged by itself",
            "value": {"input": [{"type": "text", "text": "Hello."}, {"type": "text", "text": "?"}]},
        },
    },
    "/v1/batches": {
        "chat": {
            "summary": "A file of chat requests",
            "value": {
                "input_file_id": "file-01J9ZQ3V8T6X5Y4W3V2T1S0R9Q",
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
            },
        }
    },
    "/v1/messages/batches": {
        "two": {
            "summary": "Two messages",
            "value": {
                "requests": [
                    {
                        "custom_id": f"question-{number}",
                        "params": {"model": _MODEL, "max_tokens": 64, "messages": _ASK},
                    }
                    for number in (1, 2)
                ]
            },
        }
    },
    "/v1/uploads": {
        "file": {
            "summary": "A file in parts",
            "value": {
                "bytes": 1_048_576,
                "filename": "requests.jsonl",
                "mime_type": "application/jsonl",
                "purpose": "batch",
            },
        }
    },
}
