"""The bytes of chunks and whole answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace_contracts.types.v1.types_pb2 import TokenUsage
from headrace_contracts.worker.v1.worker_pb2 import TokenLogprob
from headrace_gateway.answer_format import (
    AnswerHead,
    ChatFormat,
    ChoiceAnswer,
    CompletionFormat,
    encode_text,
    usage_json,
)

HEAD = AnswerHead("id-1", 5, 'm"odel', "fp_1")
LOGPROB = TokenLogprob(token=b"\xc3", logprob=-0.5, top=[TokenLogprob(token=b"a", logprob=-1e9)])


def data(chunk: bytes) -> Any:
    assert chunk.startswith(b"data: ")
    assert chunk.endswith(b"\n\n")
    assert chunk.count(b"\n") == 2
    return json.loads(chunk[6:])


@pytest.mark.parametrize(
    "text", ["plain", 'quote " \\ /', "a\nb\r\nc\x00\x07\x7f", "\u2028\u2029\x85", "😀 水車", ""]
)
def test_text_survives_and_cuts_no_event(text: str) -> None:
    """Whatever the text, the event is one line and reads back the same."""
    chunk = ChatFormat(HEAD).delta(2, text, None, b"")
    assert data(chunk)["choices"][0]["delta"] == {"content": text}
    assert len(chunk.decode().strip().splitlines()) == 1
    assert json.loads(encode_text(text)) == text


def test_chat_chunks() -> None:
    """Opening with the role, deltas, one finish, usage with no choices."""
    form = ChatFormat(HEAD)
    opening = data(form.opening(0))
    assert opening["object"] == "chat.completion.chunk"
    assert (opening["id"], opening["created"], opening["model"]) == ("id-1", 5, 'm"odel')
    assert opening["choices"][0]["delta"]["role"] == "assistant"
    finish = data(form.finish(1, "length", b',"usage":null'))
    assert finish["choices"] == [
        {"index": 1, "delta": {}, "logprobs": None, "finish_reason": "length"}
    ]
    assert finish["usage"] is None
    usage = data(form.usage_chunk(TokenUsage(prompt_tokens=3, output_tokens=2)))
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 5


def test_chat_logprobs_are_finite_and_complete() -> None:
    """Half a character has its bytes, and a replacement character as text."""
    chunk = data(ChatFormat(HEAD).delta(0, "x", [LOGPROB], b""))
    (entry,) = chunk["choices"][0]["logprobs"]["content"]
    assert entry == {
        "token": "\ufffd",
        "logprob": -0.5,
        "bytes": [0xC3],
        "top_logprobs": [{"token": "a", "logprob": -1e9, "bytes": [97]}],
    }


def test_completion_chunks() -> None:
    """No opening; offsets go on from chunk to chunk."""
    form = CompletionFormat(HEAD)
    assert form.opening(0) == b""
    first = data(form.delta(0, "ab", [TokenLogprob(token=b"ab", logprob=-1)], b""))
    second = data(form.delta(0, "c", [TokenLogprob(token=b"c", logprob=-1)], b""))
    assert first["object"] == "text_completion"
    assert first["choices"][0]["text"] == "ab"
    assert second["choices"][0]["logprobs"]["text_offset"] == [2]


def test_offsets_count_characters_of_the_text() -> None:
    """Parts of a character begin where it does, whole and in chunks; the echo's first has none."""
    pieces = ["é😀".encode()[i : i + 1] for i in range(6)] + [b"!"]
    tokens = [TokenLogprob(token=piece, logprob=-1) for piece in pieces]
    choice = ChoiceAnswer("é😀!", "stop", tokens)
    whole = json.loads(CompletionFormat(HEAD).whole([choice], TokenUsage()))
    assert whole["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 1, 2]
    form = CompletionFormat(HEAD)
    chunks = [data(form.delta(0, text, tokens[a:b], b"")) for text, a, b in CUTS]
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks]
    assert offsets == [[0], [0, 1, 1], [1, 1, 2]]


CUTS = [("", 0, 1), ("é", 1, 4), ("😀!", 4, 7)]


def test_parts_that_look_alike_keep_the_best() -> None:
    """Two halves of characters are one text: the likelier one's value stays."""
    top = [TokenLogprob(token=bytes([0xC3 + i]), logprob=-1 - i) for i in range(2)]
    choice = ChoiceAnswer("", "stop", [TokenLogprob(token=b"\xc3", logprob=-1, top=top)])
    whole = json.loads(CompletionFormat(HEAD).whole([choice], TokenUsage()))
    assert whole["choices"][0]["logprobs"]["top_logprobs"] == [{"\ufffd": -1.0}]


def test_whole_answers() -> None:
    """Both shapes with numbered choices."""
    choices = [ChoiceAnswer("a", "stop"), ChoiceAnswer("b", "length", [LOGPROB])]
    usage = TokenUsage(prompt_tokens=3, cached_cpu_tokens=1, output_tokens=2)
    chat = json.loads(ChatFormat(HEAD).whole(choices, usage))
    text = json.loads(CompletionFormat(HEAD).whole(choices, usage))
    assert [it["message"]["content"] for it in chat["choices"]] == ["a", "b"]
    assert [it["index"] for it in text["choices"]] == [0, 1]
    assert chat["choices"][0]["logprobs"] is None
    assert chat["usage"] == text["usage"] == usage_json(usage)
    assert chat["usage"]["prompt_tokens_details"]["cached_tokens"] == 1


def test_zero_is_said() -> None:
    """Absent counts would be read as "cache off"."""
    usage = usage_json(TokenUsage())
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0
