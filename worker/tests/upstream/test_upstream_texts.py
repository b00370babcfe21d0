"""Requests and answers of an upstream, as JSON, without any network."""

from __future__ import annotations

import json

import pytest

from headrace_common.blocks import salt_of_text
from headrace_common.errors import (
    ContextTooLong,
    InvalidRequest,
    ModelNotFound,
    Unavailable,
    Unimplemented,
)
from headrace_contracts.types.v1.types_pb2 import ReplicaRef
from headrace_contracts.worker.v1 import worker_pb2 as pb
from headrace_worker.upstream.answer_reader import AnswerReader
from headrace_worker.upstream.client import read_context, read_load, read_refusal
from headrace_worker.upstream.request_body import body_of, check_request, path_of

CHAT = pb.TextPrompt(messages_json='[{"role": "user", "content": "hi"}]', estimated_tokens=9)


def request(**fields: object) -> pb.GenerateRequest:
    asked = pb.GenerateRequest(request_id="r", model="m", text=CHAT, **fields)  # type: ignore[arg-type]
    asked.stopping.max_tokens = 8
    return asked


def test_only_what_was_asked_for_goes_out() -> None:
    """A server that knows OpenAI's fields alone must not meet others."""
    body = body_of(request(seed=5), "big")
    assert set(body) == {
        "model", "stream", "stream_options", "max_tokens", "temperature", "messages",
    }  # fmt: skip
    assert (body["model"], path_of(request())) == ("big", "/chat/completions")
    sampling = pb.Sampling(temperature=0.5, top_p=0.9, top_k=3, min_p=0.25, logit_bias={7: 1.5})
    body = body_of(request(sampling=sampling, seed=5, client_seed=True, n=2), "big")
    assert body["seed"] == 5
    assert (body["n"], body["top_k"], body["logit_bias"]) == (2, 3, {"7": 1.5})


def test_tenants_are_kept_apart_where_the_server_can() -> None:
    """One salt per tenant, which our cache index can read back; none where there is no tenant."""
    one, other = (
        body_of(request(cache_salt=salt), "big", cache_salt=True) for salt in (b"a", b"b")
    )
    assert salt_of_text(one["cache_salt"]) == b"a"
    assert one["cache_salt"] != other["cache_salt"]
    assert "cache_salt" not in body_of(request(cache_salt=b"a"), "big")
    assert "cache_salt" not in body_of(request(), "big", cache_salt=True)


def test_constraints_and_tools_are_spelled_as_openai_spells_them() -> None:
    """A forced function by its name, a schema as a strict response_format."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    rules = pb.ToolCallRules(
        functions=[pb.CallableFunction(name="g")], required=True, max_calls=1, begin="<", end=">"
    )
    asked = request(constraint=pb.OutputConstraint(json_schema='{"type": "object"}'))
    asked.constraint.tool_calls.CopyFrom(rules)
    asked.text.tools_json = json.dumps(tools)
    body = body_of(asked, "big")
    assert body["tools"] == tools[1:]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "g"}}
    assert body["parallel_tool_calls"] is False
    assert body["response_format"]["json_schema"]["strict"] is True
    calls = [{"id": "c", "type": "function", "function": {"name": "g", "arguments": {"a": 1}}}]
    asked.text.messages_json = json.dumps(
        [{"role": "assistant", "content": "", "tool_calls": calls}]
    )
    (message,) = body_of(asked, "big")["messages"]
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": "other"}, ModelNotFound),
        ({"text": None, "prompt_token_ids": [1]}, InvalidRequest),
        ({"resume": [pb.ResumeChoice(output_token_ids=[1])]}, Unimplemented),
        ({"logprobs": pb.LogprobOptions(prompt=True)}, InvalidRequest),
        (
            {
                "constraint": pb.OutputConstraint(
                    tool_calls=pb.ToolCallRules(functions=[pb.CallableFunction(regex="a")])
                )
            },
            InvalidRequest,
        ),
    ],
)
def test_what_cannot_be_passed_on_is_refused(change: dict[str, object], error: type) -> None:
    """A stream above all: no server takes over what another began."""
    fields: dict[str, object] = {"request_id": "r", "model": "m", "text": CHAT, **change}
    with pytest.raises(error):
        check_request(pb.GenerateRequest(**fields), "m")  # type: ignore[arg-type]


def reader(**fields: object) -> AnswerReader:
    return AnswerReader(ReplicaRef(worker_id="u"), request(**fields))


def piece(text: str = "", reason: str | None = None, **delta: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": text, **delta}, "finish_reason": reason}]}


def test_counts_are_a_guess_until_they_are_told() -> None:
    """A client that leaves in mid-answer is billed by the guess, and the books say so."""
    reading = reader()
    first = reading.read(piece("a"))
    assert (first.started.replica.worker_id, first.usage_is_estimate) == ("u", True)
    assert (first.usage.prompt_tokens, first.usage.output_tokens) == (9, 1)
    reading.read(piece("b", "length"))
    details = {"cached_tokens": 12}
    usage = {"prompt_tokens": 12, "completion_tokens": 5, "prompt_tokens_details": details}
    reading.read({"choices": [], "usage": usage})
    last = reading.last()
    assert (last.usage_is_estimate, last.usage.output_tokens) == (False, 5)
    assert last.usage.cached_gpu_tokens == 11
    assert last.deltas[0].finish_reason == pb.FINISH_REASON_LENGTH


def test_calls_are_spelled_into_the_text() -> None:
    """Piece by piece; the next call or the end closes the one before."""
    reading = reader()

    def call(idx: int, name: str | None, arguments: str) -> dict[str, object]:
        return piece(
            tool_calls=[{"index": idx, "function": {"name": name, "arguments": arguments}}]
        )

    texts = [
        reading.read(call(0, "f", '{"a"')).deltas[0].text,
        reading.read(call(0, None, ": 1}")).deltas[0].text,
        reading.read(call(1, "g", "{}")).deltas[0].text,
    ]
    reading.read(piece(reason="tool_calls"))
    texts.append(reading.last().deltas[0].text)
    calls = "".join(texts).split("</tool_call>")[:-1]
    read = [json.loads(text.strip().removeprefix("<tool_call>")) for text in calls]
    assert read == [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]


@pytest.mark.parametrize(
    "chunk", [{"error": {"message": "x"}}, {"choices": [{"index": 9}]}, {"choices": [3]}]
)
def test_what_is_no_answer_is_a_failure(chunk: dict[str, object]) -> None:
    """Never an answer with a hole in it."""
    with pytest.raises(Unavailable):
        reader().read(chunk)


def test_the_load_is_read_from_the_metrics_of_known_servers() -> None:
    """Summed over engines; silence where nothing is told."""
    running = "vllm:num_requests_running"
    lines = ["# HELP x", f'{running}{{engine="0"}} 2.0', f'{running}{{engine="1"}} 1.0']
    load = read_load("\n".join([*lines, "vllm:num_requests_waiting{} 4"]))
    assert (load.num_running, load.num_waiting) == (3, 4)
    assert read_load("other 1\n").num_running is None
    assert read_load("vllm:num_requests_running{} NaN\n").num_running is None


@pytest.mark.parametrize(
    "said",
    [
        {"code": "context_length_exceeded", "message": "x"},
        {"code": 400, "message": "This model's maximum context length is 2048 tokens."},
        # llama.cpp's.
        {
            "code": 400,
            "message": "request (3031 tokens) exceeds the available context size (2048 tokens)",
            "type": "exceed_context_size_error",
        },
    ],
)
def test_a_prompt_that_is_too_long_is_told_as_such(said: dict[str, object]) -> None:
    """Whatever the server's words, the client gets the code that SDKs look for."""
    error = read_refusal(400, json.dumps({"error": said}).encode(), None)
    assert type(error) is ContextTooLong
    assert type(read_refusal(400, b'{"error": {"message": "no"}}', None)) is InvalidRequest


@pytest.mark.parametrize("status", [204, 302, 404, 408, 409, 500, 503])
def test_what_was_not_to_be_expected_is_tried_elsewhere(status: int) -> None:
    """The client asked for nothing wrong, so another replica or a fallback may answer."""
    error = read_refusal(status, b"<a href='http://internal.example/'>", None)
    assert type(error) is Unavailable
    assert "internal.example" not in error.public_message


def test_the_context_is_read_where_servers_tell_it() -> None:
    """vLLM, Headrace, llama.cpp (of one slot), or nowhere."""
    assert read_context({"id": "m", "max_model_len": 4096}) == 4096
    assert read_context({"id": "m", "context_window": 8192, "meta": None}) == 8192
    assert read_context({"id": "m", "meta": {"n_ctx": 2048, "n_ctx_train": 8192}}) == 2048
    assert read_context({"id": "m"}) == 0


@pytest.mark.parametrize(
    ("named", "sent"),
    [
        ({}, {}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"temperature": 1, "top_p": 1, "min_p": 0, "repetition_penalty": 1},
         {"temperature": 1, "top_p": 1, "min_p": 0, "repetition_penalty": 1}),
        ({"top_k": 0}, {"top_k": -1}),
    ],
)  # fmt: skip
def test_what_the_client_left_open_is_the_engines(
    named: dict[str, float], sent: dict[str, float]
) -> None:
    """Its own defaults stand; a value that switches off is sent like any other."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    asked = request(sampling=pb.Sampling(temperature=1, top_p=1))
    asked.text.named_sampling.CopyFrom(pb.SamplingValues(**named))  # type: ignore[arg-type]
    body = body_of(asked, "big")
    assert {name: body[name] for name in names if name in body} == sent
