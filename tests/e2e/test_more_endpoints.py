"""Messages, responses, batches and idempotency work on a running fleet with the real SDKs."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import httpx
import openai
import pytest

from headrace_testing.api import body
from headrace_testing.processes import ApiKey, Fleet
from headrace_testing.waiting import eventually_sync

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]
ASK = "Name three colours."


@pytest.fixture(scope="module")
def key(fleet: Fleet) -> ApiKey:
    return fleet.create_key("more")


@pytest.fixture(scope="module")
def client(fleet: Fleet, key: ApiKey) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fleet.base_url}/v1", api_key=key.api_key, max_retries=0) as sdk:
        yield sdk


def test_messages_say_what_chat_says(fleet: Fleet, key: ApiKey, client: openai.OpenAI) -> None:
    """Anthropic's SDK, whole and streamed, gets the text of the same greedy chat."""
    chat = client.chat.completions.create(
        model=fleet.model,
        messages=[{"role": "user", "content": ASK}],
        temperature=0,
        max_tokens=12,
    )
    with anthropic.Anthropic(base_url=fleet.base_url, api_key=key.api_key, max_retries=0) as sdk:
        ask = {
            "model": fleet.model,
            "messages": [{"role": "user", "content": ASK}],
            "max_tokens": 12,
            "extra_body": {"temperature": 0},
        }
        whole = sdk.messages.create(**ask)
        with sdk.messages.stream(**ask) as stream:
            text = "".join(stream.text_stream)
            last = stream.get_final_message()
        counted = sdk.messages.count_tokens(model=fleet.model, messages=ask["messages"])
    assert whole.content[0].text == text == chat.choices[0].message.content
    assert last.usage.output_tokens == chat.usage.completion_tokens
    cached = last.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == last.usage.input_tokens + cached == chat.usage.prompt_tokens


def test_a_response_is_streamed_kept_and_continued(fleet: Fleet, client: openai.OpenAI) -> None:
    with client.responses.create(
        model=fleet.model, input=ASK, temperature=0, max_output_tokens=12, stream=True
    ) as events:
        seen = list(events)
    made = seen[-1].response
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert client.responses.retrieve(made.id).output_text == made.output_text
    later = client.responses.create(
        model=fleet.model, input="And one more.", previous_response_id=made.id, max_output_tokens=4
    )
    assert later.usage.input_tokens > made.usage.input_tokens + made.usage.output_tokens


def test_a_batch_runs_and_is_billed_by_its_price(fleet: Fleet, client: openai.OpenAI) -> None:
    """Each line has a result and one ledger entry at the batch price."""
    key = fleet.create_key("batches")
    lines = [
        {
            "custom_id": f"l{idx}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": body(fleet, f"Say {idx}.", max_tokens=3),
        }
        for idx in range(4)
    ]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    with openai.OpenAI(base_url=f"{fleet.base_url}/v1", api_key=key.api_key, max_retries=0) as sdk:
        file = sdk.files.create(file=("in.jsonl", content), purpose="batch")
        batch = sdk.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        batch = eventually_sync(
            lambda: (it := sdk.batches.retrieve(batch.id)).status == "completed" and it,
            within_s=60,
            every_s=0.5,
        )
        results = [
            json.loads(it) for it in sdk.files.content(batch.output_file_id).text.splitlines()
        ]
    assert [it["custom_id"] for it in results] == ["l0", "l1", "l2", "l3"]
    records = {it["request_id"]: it for it in fleet.closed_usage(key, 4)}
    assert len(records) == 4
    for result in results:
        usage = result["response"]["body"]["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        plain = usage["prompt_tokens"] - cached
        # Half of the standard price, of the packaged table.
        due = 10 * plain + cached + 30 * usage["completion_tokens"]
        assert records[result["response"]["request_id"]]["amount_nano_usd"] == due


def test_the_same_post_twice_is_one_request(fleet: Fleet) -> None:
    key = fleet.create_key("twice")
    ask = body(fleet, ASK, temperature=1, max_tokens=6)
    headers = {**key.headers, "Idempotency-Key": "once"}
    url = f"{fleet.base_url}/v1/chat/completions"
    first = httpx.post(url, json=ask, headers=headers, timeout=60)
    again = httpx.post(url, json=ask, headers=headers, timeout=60)
    assert first.content == again.content
    assert again.headers["idempotent-replayed"] == "true"
    assert httpx.post(url, json={**ask, "seed": 1}, headers=headers).status_code == 409
    assert len(fleet.closed_usage(key, 1)) == 1
