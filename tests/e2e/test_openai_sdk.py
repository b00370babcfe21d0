"""The `openai` package works against the fleet unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from headrace_testing.processes import Fleet

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    key = fleet.create_key("sdk")
    with openai.OpenAI(base_url=f"{fleet.base_url}/v1", api_key=key.api_key, max_retries=0) as sdk:
        yield sdk


def test_models_are_listed_and_found(fleet: Fleet, client: openai.OpenAI) -> None:
    assert fleet.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(fleet.model).object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_a_stream_equals_the_whole_answer(fleet: Fleet, client: openai.OpenAI) -> None:
    ask = {
        "model": fleet.model,
        "messages": [{"role": "user", "content": "Name three colours."}],
        "temperature": 0,
        "max_tokens": 24,
    }
    whole = client.chat.completions.create(**ask)
    pieces, usage, reasons = [], None, []
    with client.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    ) as events:
        for event in events:
            usage = event.usage or usage
            for choice in event.choices:
                pieces.append(choice.delta.content or "")
                reasons += [choice.finish_reason] if choice.finish_reason else []
    assert "".join(pieces) == whole.choices[0].message.content
    assert reasons == [whole.choices[0].finish_reason]
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_text_completions_take_text_and_token_ids(fleet: Fleet, client: openai.OpenAI) -> None:
    text = client.completions.create(
        model=fleet.model, prompt="The capital of France is", max_tokens=8, temperature=0
    )
    assert text.choices[0].text
    many = client.completions.create(
        model=fleet.model,
        prompt=["The capital of France is", "The capital of Italy is"],
        max_tokens=8,
        temperature=0,
    )
    assert [choice.index for choice in many.choices] == [0, 1]
    assert many.choices[0].text == text.choices[0].text


def test_choices_and_logprobs(fleet: Fleet, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=fleet.model,
        messages=[{"role": "user", "content": "Name a fruit."}],
        n=3,
        seed=3,
        temperature=1.0,
        max_tokens=8,
        logprobs=True,
        top_logprobs=2,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    content = answer.choices[0].logprobs.content
    assert all(item.logprob <= 0 and len(item.top_logprobs) == 2 for item in content)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": "no-such-model"}, openai.NotFoundError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"messages": []}, openai.BadRequestError),
        ({"max_tokens": 10_000_000}, openai.BadRequestError),
        ({"extra_body": {"no_such_field": 1}}, openai.BadRequestError),
    ],
)
def test_mistakes_raise_the_sdks_own_errors(fleet: Fleet, client, fields, error) -> None:
    ask = {"model": fleet.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{**ask, **fields})
    assert caught.value.request_id
    assert caught.value.body["message"]


def test_a_wrong_key_is_an_authentication_error(fleet: Fleet) -> None:
    with (
        openai.OpenAI(base_url=f"{fleet.base_url}/v1", api_key="sk-hr-wrong", max_retries=0) as sdk,
        pytest.raises(openai.AuthenticationError),
    ):
        sdk.models.list()
