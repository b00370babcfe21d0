"""Requests of the public API: what is honoured, what is refused, and by which name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace_common.errors import InvalidRequest
from headrace_contracts.guard.v1 import guard_pb2
from headrace_gateway.openai_schema import parse_chat, parse_completion
from headrace_gateway.responses_api import schema as responses
from headrace_testing.gateway_fleet import chat_body


def chat(**fields: Any) -> Any:
    return parse_chat(json.dumps(chat_body(**fields)).encode())


def completion(**fields: Any) -> Any:
    return parse_completion(json.dumps({"model": "m", **fields}).encode())


USER = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": ...}, "model"),
        ({"model": ""}, "model"),
        ({"model": 5}, "model"),
        ({"content": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"content": [{"content": "hi"}]}, "messages[0].role"),
        ({"content": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
        ({"content": [{"role": "user"}]}, "messages[0].content"),
        ({"content": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"content": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"content": [{"role": "user", "content": [{"type": "zap"}]}]},
            "messages[0].content[0].type",
        ),
        ({"content": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"content": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"content": [{**USER, "zap": 1}]}, "messages[0].zap"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "ten"}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"min_tokens": 300}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 3}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {str(idx): 1 for idx in range(1025)}}, "logit_bias"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"zap": 1}}, "stream_options.zap"),
        ({"store": True}, "store"),
        ({"service_tier": "fast"}, "service_tier"),
        ({"priority": 3}, "priority"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"k" * 65: "a"}}, "metadata"),
        ({"zap": 1}, "zap"),
    ],
)
def test_wrong_chat_fields_are_named(fields: dict[str, Any], param: str) -> None:
    """Every mistake is a 400 whose `param` and message name the field."""
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert caught.value.http_status == 400
    assert "`" not in caught.value.public_message


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"stop": ["a"] * 5}, "stop", "array_above_max_length"),
        ({"n": 9}, "n", "integer_above_max_value"),
        ({"n": 0}, "n", "integer_below_min_value"),
        ({"max_tokens": 2**40}, "max_tokens", "integer_above_max_value"),
        ({"temperature": 2.5}, "temperature", "decimal_above_max_value"),
        ({"user": "u" * 513}, "user", "string_above_max_length"),
        ({"metadata": {"k": "v" * 513}}, "metadata", "string_above_max_length"),
        (
            {"metadata": dict.fromkeys(map(str, range(17)), "")},
            "metadata",
            "object_above_max_properties",
        ),
        ({"temperature": "hot"}, "temperature", "invalid_request"),
    ],
)
def test_what_is_beyond_a_bound_is_told_by_openais_code(
    fields: dict[str, Any], param: str, code: str
) -> None:
    """A client reads from `param` and `code` which bound it was, and from the text how much."""
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert (caught.value.param, caught.value.public_code) == (param, code)


def test_openais_four_stops_and_five_log_probabilities() -> None:
    """What OpenAI documents as the most is the most on its endpoints, and is told."""
    assert len(chat(stop=["a", "b", "c", "d"]).limits.stop) == 4
    assert completion(prompt="x", stop=["a"] * 4, logprobs=5).logprobs.top == 5
    for fields, code in (
        ({"stop": ["a"] * 5}, "array_above_max_length"),
        ({"logprobs": 6}, "integer_above_max_value"),
    ):
        with pytest.raises(InvalidRequest, match=r"<= [45]") as caught:
            completion(prompt="x", **fields)
        assert (caught.value.param, caught.value.public_code) == (next(iter(fields)), code)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{'model':",
        b"[]",
        b'"text"',
        b"\xef\xbb\xbf{}",
        b'{"model":"m","messages":[{"role":"user","content":"ab\\ud800cd"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"\\udc00"}]}',
        b'{"model":"m","stop":["\\ud800"],"messages":[{"role":"user","content":"x"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}',
        b'{"model":"m","temperature":NaN,"messages":[{"role":"user","content":"x"}]}',
        b'{"model":"m","temperature":1e999,"messages":[{"role":"user","content":"x"}]}',
        b'{"model":"m","tools":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":'
        + b"[" * 100
        + b"]" * 100
        + b"}",
    ],
)
def test_what_is_not_strict_json_is_refused(body: bytes) -> None:
    """Half surrogates, NaN, endless nesting and cut texts give a 400, never a 500."""
    with pytest.raises(InvalidRequest):
        parse_chat(body)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("audio", {"voice": "x"}),
        ("modalities", ["audio"]),
        ("prediction", {"type": "content", "content": "x"}),
        ("web_search_options", {}),
        ("prompt_cache_retention", "24h"),
    ],
)
def test_features_to_come_are_refused_by_name(field: str, value: Any) -> None:
    """Nothing that was asked for is ignored in silence; the refusal waits for the guard."""
    refusal = chat(**{field: value}).unsupported
    assert refusal is not None
    assert refusal.param == field
    assert "not supported" in refusal.public_message


@pytest.mark.parametrize(
    ("in_chat", "in_response", "is_taken"),
    [
        ({"verbosity": "low"}, {"text": {"verbosity": "low"}}, True),
        ({"verbosity": "loud"}, {"text": {"verbosity": "loud"}}, False),
        ({"prompt_cache_retention": "in_memory"}, None, True),
        ({"prompt_cache_retention": "24h"}, None, False),
        ({"prompt_cache_options": {"mode": "implicit"}}, None, True),
        ({"prompt_cache_options": {"mode": "explicit"}}, None, False),
        ({"moderation": {"model": "x"}}, None, False),
    ],
)
def test_chat_and_responses_take_the_same(in_chat: Any, in_response: Any, is_taken: bool) -> None:
    """A field that both have is honoured, let pass or refused by its name on both."""
    (name,) = in_chat
    asked = {"model": "m", "input": "hi", **(in_response or in_chat)}
    outcomes = []
    for read in (
        lambda: chat(**in_chat).unsupported,
        lambda: responses.read(responses.parse(json.dumps(asked).encode()), []).unsupported,
    ):
        try:
            outcomes.append(read())
        except InvalidRequest as error:
            outcomes.append(error)
    assert [it is None for it in outcomes] == [is_taken] * 2
    assert all(is_taken or str(it.param).split(".")[-1] == name for it in outcomes)


def test_values_that_ask_for_nothing_pass() -> None:
    """SDKs that send every field with its default are served."""
    request = chat(
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        max_tokens=None,
        max_completion_tokens=None,
        temperature=None,
        logprobs=None,
        stop=None,
        n=None,
        stream=None,
        stream_options=None,
        store=False,
        service_tier="auto",
        user="u",
        metadata={"a": "b"},
        logit_bias=None,
        parallel_tool_calls=None,
    )
    assert request.unsupported is None
    assert request.limits.max_tokens is None
    assert (request.sampling.temperature, request.sampling.top_p, request.n) == (1.0, 1.0, 1)


def test_sampling_fields_arrive() -> None:
    """Each honoured field is where the worker reads it."""
    request = chat(
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        frequency_penalty=-1,
        presence_penalty=1,
        repetition_penalty=1.5,
        logit_bias={"7": -100},
        seed=-1,
        stop="x",
        stop_token_ids=[5],
        min_tokens=2,
        ignore_eos=True,
        max_completion_tokens=9,
        logprobs=True,
        n=8,
        prompt_cache_key="k",
    )
    sampling, limits = request.sampling, request.limits
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.5, 0)
    assert dict(sampling.logit_bias) == {7: -100}
    assert request.seed == 2**64 - 1
    assert (limits.max_tokens, limits.min_tokens) == (9, 2)
    assert (list(limits.stop), list(limits.stop_token_ids), limits.ignore_eos) == (["x"], [5], True)
    assert (request.logprobs.output, request.logprobs.top) == (True, 0)
    assert (request.n, request.session_id) == (8, "k")


def test_narrowest_nucleus_is_not_off() -> None:
    """top_p 0 means the likeliest token; the contract's 0 would mean no limit."""
    assert 0 < chat(top_p=0).sampling.top_p < 0.001


def test_of_a_key_given_twice_the_last_counts_everywhere() -> None:
    """One reading for all parts of the gateway: guard and worker see the same text."""
    body = b'{"model":"m","messages":[{"role":"user","content":"one"}],"max_tokens":2,'
    body += b'"max_tokens":4,"messages":[{"role":"user","content":"two"}]}'
    request = parse_chat(body)
    assert request.limits.max_tokens == 4
    assert request.messages[0]["content"] == "two"
    assert [part.text for part in request.guard_parts] == ["two"]


def test_parts_are_joined_for_model_and_guard_alike() -> None:
    """What the model reads as one text the guard judges as one text."""
    parts = [{"type": "text", "text": "First half, "}, {"type": "text", "text": "second."}]
    request = chat(content=[{"role": "user", "content": parts}])
    assert request.messages[0]["content"] == "First half, second."
    assert [part.text for part in request.guard_parts] == ["First half, second."]


@pytest.mark.parametrize(
    ("kind", "word"), [("image_url", "images"), ("input_audio", "audio"), ("file", "files")]
)
def test_media_are_refused_unread(kind: str, word: str) -> None:
    """The message says that the model takes none; the content is not even typed."""
    part = {"type": kind, kind: {"url": "http://169.254.169.254/"}}
    with pytest.raises(InvalidRequest, match=f"takes no {word}"):
        chat(content=[{"role": "user", "content": [part]}])


def test_tool_history_is_kept_and_trusted_by_role() -> None:
    """Arguments become values for the template; each text has its trust level and its path."""
    request = chat(
        content=[
            {"role": "developer", "content": "d"},
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "t"},
        ]
    )
    call = request.messages[2]["tool_calls"][0]
    assert call["function"] == {"name": "f", "arguments": {"a": 1}}
    trust = {part.path: part.trust for part in request.guard_parts}
    assert trust["messages[0].content"] == guard_pb2.TRUST_OWNER
    assert trust["messages[1].content"] == guard_pb2.TRUST_USER
    assert trust["messages[2].tool_calls[0].function.arguments"] == guard_pb2.TRUST_MODEL
    assert trust["messages[3].content"] == guard_pb2.TRUST_UNTRUSTED


def test_redaction_reaches_its_place() -> None:
    """A new text from the guard replaces the message's, the argument's, the prompt's."""
    request = chat(content=[USER, {"role": "assistant", "tool_calls": [CALL]}])
    paths = [part.path for part in request.guard_parts]
    arguments = paths.index("messages[1].tool_calls[0].function.arguments")
    request.redact({0: "bye", arguments: "{}"})
    assert request.messages[0]["content"] == "bye"
    assert request.messages[1]["tool_calls"][0]["function"]["arguments"] == "{}"
    prompts = completion(prompt=["a", "b"])
    prompts.redact({1: "x"})
    assert prompts.prompts == ["a", "x"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts_of_every_kind(prompt: Any, expected: Any) -> None:
    """Text, texts, ids, lists of ids."""
    assert completion(prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [2**32]}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "best_of": 1, "n": 2}, "best_of"),
        ({"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "tools": []}, "tools"),
        ({"prompt": "a", "max_completion_tokens": 4}, "max_completion_tokens"),
    ],
)
def test_wrong_completion_fields_are_named(fields: dict[str, Any], param: str) -> None:
    """As for chat."""
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    assert caught.value.param == param


def test_words_to_the_template_arrive_and_are_judged() -> None:
    """Whether the template knows them is seen once the model is known."""
    request = chat(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
    assert request.template_args == {"enable_thinking": False, "reasoning_effort": "low"}
    judged = {part.path: part.text for part in request.guard_parts}
    assert "low" in judged["chat_template_kwargs"]


def test_what_is_shown_beside_the_text() -> None:
    """Ids and the prompt's log probabilities are carried by the worker's log probabilities."""
    plain = chat()
    assert plain.logprobs is None
    ids = chat(return_token_ids=True)
    assert (ids.logprobs.output, ids.logprobs.top, ids.shown.logprobs) == (True, 0, False)
    of_prompt = chat(prompt_logprobs=3)
    assert (of_prompt.logprobs.prompt, of_prompt.logprobs.top) == (True, 3)
    echo = completion(prompt="a", echo=True, max_tokens=0, logprobs=1)
    assert (echo.limits.max_tokens, echo.shown.is_echo_only, echo.logprobs.prompt) == (
        1,
        True,
        True,
    )
    best = completion(prompt="a", best_of=5, n=2)
    assert (best.n, best.shown.num_best, best.logprobs.output) == (5, 2, True)
    assert chat(service_tier="flex").service_tier == "flex"
    assert chat(service_tier="auto").shown.tier == "default"
    assert list(chat(allowed_token_ids=[3]).sampling.allowed_token_ids) == [3]


def test_a_completion_without_max_tokens_gets_sixteen() -> None:
    """As OpenAI documents it; a chat without them may fill what is left."""
    assert completion(prompt="x").limits.max_tokens == 16
    assert completion(prompt="x", max_tokens=None, min_tokens=20).limits.max_tokens == 20
    assert completion(prompt="x", max_tokens=3).limits.max_tokens == 3
    assert chat(max_tokens=None).limits.max_tokens is None
