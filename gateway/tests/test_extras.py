"""Less usual fields over HTTP: echo, best_of, token ids, the prompt's log probabilities, tiers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from headrace_contracts.types.v1.types_pb2 import PRIORITY_BATCH, PRIORITY_STANDARD, TokenUsage
from headrace_contracts.usage.v1 import usage_pb2
from headrace_contracts.worker.v1.worker_pb2 import TokenLogprob
from headrace_gateway.answer_format import AnswerHead, CompletionFormat
from headrace_gateway.api_request import Shown
from headrace_gateway.captured_exchange import CapturedExchange
from headrace_gateway.whole_answer import WholeAnswer
from headrace_testing.fake_worker import MODEL, saying
from headrace_testing.gateway_fleet import GatewayFleet, chat_body


async def post(fleet: GatewayFleet, path: str, body: dict[str, Any]) -> httpx.Response:
    async with fleet.http() as client:
        return await client.post(path, json=body)


async def complete(fleet: GatewayFleet, **fields: Any) -> Any:
    response = await post(fleet, "/v1/completions", {"model": MODEL, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def test_echo_repeats_the_prompt_with_its_log_probabilities(fleet: GatewayFleet) -> None:
    """Before each choice's text; the first token has none; offsets run through."""
    fleet.worker.script = saying("!")
    answer = await complete(fleet, prompt=["ab", "cde"], echo=True, logprobs=1, n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["ab!", "ab!", "cde!", "cde!"]
    said = answer["choices"][2]["logprobs"]
    assert said["tokens"][:4] == ["c", "d", "e", "!"]
    assert said["token_logprobs"][0] is None
    assert said["top_logprobs"][0] is None
    assert said["text_offset"][:4] == [0, 1, 2, 3]


async def test_echo_alone_makes_no_text(fleet: GatewayFleet) -> None:
    """What evaluation harnesses ask for: the prompt's log probabilities and nothing else."""
    answer = await complete(fleet, prompt="abc", echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]


async def test_a_streamed_echo_equals_the_whole_one(fleet: GatewayFleet) -> None:
    """The prompt comes as the first piece."""
    body = {"model": MODEL, "prompt": "abc", "echo": True, "stream": True, "seed": 4}
    whole = await complete(fleet, prompt="abc", echo=True, seed=4)
    response = await post(fleet, "/v1/completions", body)
    chunks = [
        json.loads(line.removeprefix("data: "))
        for line in response.text.splitlines()
        if line.startswith("data: {")
    ]
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert texts[0] == "abc"
    assert "".join(texts) == whole["choices"][0]["text"]


async def test_best_of_keeps_the_likeliest_and_bills_all(fleet: GatewayFleet) -> None:
    """n of them, numbered anew; log probabilities only where asked for."""
    answer = await complete(fleet, prompt="abc", best_of=4, n=2, max_tokens=5)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 20


async def test_token_ids_of_prompt_and_output(fleet: GatewayFleet) -> None:
    """vLLM's shape on both endpoints, streamed and whole alike."""
    fleet.worker.script = saying("hey")
    answer = await complete(fleet, prompt="abc", return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["prompt_token_ids"] == list(b"abc")
    assert choice["token_ids"][:3] == list(b"hey")
    assert choice["logprobs"] is None
    chat = (await post(fleet, "/v1/chat/completions", chat_body(return_token_ids=True))).json()
    assert chat["choices"][0]["token_ids"][:3] == list(b"hey")
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    streamed = await post(
        fleet, "/v1/chat/completions", chat_body(return_token_ids=True, stream=True)
    )
    chunks = [
        json.loads(line.removeprefix("data: "))
        for line in streamed.text.splitlines()
        if line.startswith("data: {")
    ]
    assert chunks[0]["prompt_token_ids"] == chat["prompt_token_ids"]
    ids = [i for chunk in chunks for c in chunk["choices"] for i in c.get("token_ids", ())]
    assert ids == chat["choices"][0]["token_ids"]


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_token_ids_of_an_echo_are_those_of_the_output(
    fleet: GatewayFleet, logprobs: int | None
) -> None:
    """The prompt's have their own place, whatever else is asked for; streamed and whole alike."""
    fleet.worker.script = saying("hé")
    fields = {"prompt": "abc", "echo": True, "return_token_ids": True, "logprobs": logprobs}
    (choice,) = (await complete(fleet, **fields))["choices"]
    assert choice["prompt_token_ids"] == list(b"abc")
    assert choice["token_ids"][:3] == list("hé".encode())
    body = {"model": MODEL, "stream": True, **fields}
    streamed = await post(fleet, "/v1/completions", body)
    chunks = [
        json.loads(line.removeprefix("data: "))["choices"][0]
        for line in streamed.text.splitlines()
        if line.startswith("data: {")
    ]
    assert [i for chunk in chunks for i in chunk.get("token_ids", ())] == choice["token_ids"]


async def test_the_best_are_those_whose_output_is_likeliest() -> None:
    """What is echoed is the same for all, and would weigh more in a short one's mean."""

    def told(*logprobs: float) -> list[TokenLogprob]:
        return [TokenLogprob(token=b"x", logprob=it) for it in logprobs]

    exchange = CapturedExchange()
    form = CompletionFormat(AnswerHead("cmpl-1", 0, MODEL, "fp"))
    answer = WholeAnswer(exchange, form, Shown(logprobs=True, echo=True, num_best=1), num_made=2)
    await answer.begin(2)
    for choice_idx, made in enumerate([told(-1.2), told(-1.0, -1.0)]):
        answer.add_text(choice_idx, "prompt", told(-0.0, -0.0, -0.0))
        answer.add_text(choice_idx, f" {choice_idx}", made)
        answer.add_finish(choice_idx, "stop")
    await answer.end(TokenUsage())
    assert json.loads(exchange.body)["choices"][0]["text"] == "prompt 1"


async def test_log_probabilities_of_the_prompt(fleet: GatewayFleet) -> None:
    """A dictionary by id for each token but the first, at the place that vLLM gives it."""
    text = await complete(fleet, prompt="abc", prompt_logprobs=1)
    first, second, third = text["choices"][0]["prompt_logprobs"]
    assert first is None
    assert set(second[str(ord("b"))]) == {"logprob", "rank", "decoded_token"}
    assert third[str(ord("c"))]["decoded_token"] == "c"
    chat = (await post(fleet, "/v1/chat/completions", chat_body(prompt_logprobs=0))).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("asked", "said", "priority", "tier"),
    [
        (..., None, PRIORITY_STANDARD, usage_pb2.PRICE_TIER_STANDARD),
        ("auto", "default", PRIORITY_STANDARD, usage_pb2.PRICE_TIER_STANDARD),
        ("flex", "flex", PRIORITY_BATCH, usage_pb2.PRICE_TIER_BATCH),
    ],
)
async def test_flex_waits_behind_others_at_the_price_of_batches(
    fleet: GatewayFleet, asked: Any, said: Any, priority: int, tier: int
) -> None:
    """The tier that was served is told."""
    answer = await post(fleet, "/v1/chat/completions", chat_body(service_tier=asked))
    assert answer.json().get("service_tier") == said
    assert fleet.worker.requests[0].priority == priority
    assert fleet.usage.closed_events()[0].price_tier == tier


@pytest.mark.parametrize(("asked", "goal"), [(..., (700, 40)), ("flex", (60_000, 0))])
async def test_workers_are_told_what_a_tier_wants(
    fleet_parts: GatewayFleet, asked: Any, goal: tuple[int, int]
) -> None:
    """Of first token and tokens after it; a flex request lets its steps take what they take."""
    fleet_parts.settings |= {"ttft_slo_standard_ms": 700, "tpot_slo_standard_ms": 40}
    await fleet_parts.start()
    await post(fleet_parts, "/v1/chat/completions", chat_body(service_tier=asked))
    told = fleet_parts.worker.requests[0]
    assert (told.ttft_slo_ms, told.tpot_slo_ms) == goal
    await fleet_parts.close()


async def test_priority_is_for_keys_that_have_it(fleet: GatewayFleet) -> None:
    """Others are told, not served in silence as usual."""
    answer = await post(fleet, "/v1/chat/completions", chat_body(service_tier="priority"))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "service_tier")


async def test_words_that_the_template_does_not_know_are_refused(fleet: GatewayFleet) -> None:
    """By name."""
    for fields, param in (
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ):
        answer = await post(fleet, "/v1/chat/completions", chat_body(**fields))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith(param)


async def test_an_effort_is_let_pass_where_nothing_reasons(fleet: GatewayFleet) -> None:
    """As in the other two APIs: agents send one to every model, and every level is the same."""
    prompts = []
    for fields in ({}, {"reasoning_effort": "low"}, {"reasoning_effort": "none"}):
        answer = await post(fleet, "/v1/chat/completions", chat_body(**fields))
        assert answer.status_code == 200, answer.text
        prompts.append(list(fleet.worker.requests[-1].prompt_token_ids))
    assert prompts[0] == prompts[1] == prompts[2]
