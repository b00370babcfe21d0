"""What fits a model's context and a key's limits."""

from __future__ import annotations

import re

import pytest

from headrace_common.errors import ContextTooLong, InvalidRequest
from headrace_contracts.ratelimit.v1.ratelimit_pb2 import Limits as KeyLimits
from headrace_contracts.ratelimit.v1.ratelimit_pb2 import Scope
from headrace_contracts.worker.v1.worker_pb2 import ModelCard, Sampling
from headrace_gateway.api_request import ApiRequest, Endpoint, Limits, Prompt, StreamOptions
from headrace_gateway.model_directory import ServedCard
from headrace_gateway.principal import Principal
from headrace_gateway.prompt_sizes import check_ids, default_max_tokens, output_bound

CARD = ServedCard.of(ModelCard(context_tokens=100, vocab_size=50))


def request(
    max_tokens: int | None = None,
    *prompts: Prompt,
    sampling: Sampling | None = None,
    endpoint: Endpoint = Endpoint.COMPLETIONS,
) -> ApiRequest:
    return ApiRequest(
        endpoint=endpoint,
        model="m",
        sampling=sampling or Sampling(),
        limits=Limits(max_tokens),
        streaming=StreamOptions(),
        prompts=list(prompts),
    )


@pytest.mark.parametrize(
    ("max_tokens", "prompt_tokens", "bound"),
    [(None, 10, 64), (None, 90, 10), (None, 99, 1), (5, 95, 5), (90, 10, 90)],
)
def test_bounds(max_tokens: int | None, prompt_tokens: int, bound: int) -> None:
    """The client's number, or what is left of the context up to the default."""
    assert output_bound(request(max_tokens), prompt_tokens, CARD, 64) == bound


@pytest.mark.parametrize(
    ("max_tokens", "prompt_tokens"), [(None, 100), (None, 500), (1, 100), (6, 95)]
)
def test_what_does_not_fit_is_told_with_both_lengths(
    max_tokens: int | None, prompt_tokens: int
) -> None:
    """Context and prompt are named, in the words that clients look for; no negative number."""
    with pytest.raises(ContextTooLong) as caught:
        output_bound(request(max_tokens), prompt_tokens, CARD, 64)
    message = caught.value.public_message
    assert message.startswith("This model's maximum context length is 100 tokens")
    assert f" {prompt_tokens} are in the prompt" in message
    assert not re.search(r"-\d", message)


@pytest.mark.parametrize(
    ("max_tokens", "words", "numbers"),
    [
        (9, r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", ("120", "100")),
        (
            60,
            r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)",
            ("70", "60", "100"),
        ),
    ],
)
def test_anthropics_clients_find_their_words(
    max_tokens: int, words: str, numbers: tuple[str, ...]
) -> None:
    """Claude Code tells these errors by these words, and compacts or asks for less."""
    asked = request(max_tokens, endpoint=Endpoint.MESSAGES)
    with pytest.raises(ContextTooLong) as caught:
        output_bound(asked, int(numbers[0]), CARD, 64)
    found = re.search(words, caught.value.public_message)
    assert found is not None
    assert found.groups() == numbers


def test_an_empty_prompt_is_refused() -> None:
    """There is nothing to answer."""
    with pytest.raises(InvalidRequest):
        output_bound(request(), 0, CARD, 64)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (request(None, [1, 50]), "prompt"),
        (request(None, "x", sampling=Sampling(logit_bias={50: 1.0})), "logit_bias"),
    ],
)
def test_ids_outside_the_vocabulary(asked: ApiRequest, param: str) -> None:
    """An id that the model lacks is the client's mistake, told by field."""
    with pytest.raises(InvalidRequest) as caught:
        check_ids(asked, CARD)
    assert caught.value.param == param
    check_ids(request(None, [1, 49]), CARD)


def test_the_default_fits_the_tightest_limit() -> None:
    """Per choice, and at least one token, so that the limiter decides and not we."""
    scopes = [
        Scope(limits=KeyLimits(tokens_per_minute=200)),
        Scope(limits=KeyLimits(output_tokens_per_minute=90)),
    ]
    principal = Principal(limits=scopes)
    assert default_max_tokens(principal, 4096, 1, 50) == 90
    assert default_max_tokens(principal, 4096, 3, 50) == 30
    assert default_max_tokens(principal, 4096, 1, 150) == 50
    assert default_max_tokens(principal, 4096, 1, 500) == 1
    assert default_max_tokens(Principal(), 4096, 8, 10) == 4096
