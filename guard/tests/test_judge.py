"""The judge: yes or no from an OpenAI-compatible endpoint; anything else is a failure."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest

from headrace_guard.classifiers.heads import HARM, INJECTION
from headrace_guard.classifiers.judge import (
    NO,
    YES,
    HttpJudge,
    JudgeEndpoint,
    JudgeFailedError,
)

_ENDPOINT = JudgeEndpoint("http://judge.test/v1", "m", "key", 0.2, 1)
_BOTH = frozenset({HARM, INJECTION})


def _says(content: str) -> Callable[[httpx.Request], httpx.Response]:
    body = {"choices": [{"message": {"content": content}}]}
    return lambda _request: httpx.Response(200, json=body)


async def _ask(handler: Callable[[httpx.Request], httpx.Response]) -> object:
    judge = HttpJudge(_ENDPOINT, httpx.MockTransport(handler))
    try:
        return await judge.ask("t", "some text", _BOTH)
    finally:
        await judge.close()


async def test_an_answer_becomes_probabilities() -> None:
    """Words around the JSON object do not matter."""
    answer = 'Sure: {"harm": true, "injection": false}'
    assert await _ask(_says(answer)) == {HARM: YES, INJECTION: NO}


@pytest.mark.parametrize(
    "handler",
    [
        _says("no idea"),
        _says('{"harm": true}'),
        _says('{"harm": "yes", "injection": false}'),
        # Models that think or call tools may answer without a text.
        lambda _request: httpx.Response(200, json={"choices": [{"message": {"content": None}}]}),
        lambda _request: httpx.Response(200, json={"choices": [{"message": {"content": [1]}}]}),
        lambda _request: httpx.Response(500),
        lambda _request: httpx.Response(200, text="not json"),
    ],
)
async def test_anything_else_is_a_failure(
    handler: Callable[[httpx.Request], httpx.Response],
) -> None:
    """No answer is never taken for "clean"."""
    with pytest.raises(JudgeFailedError):
        await _ask(handler)


async def test_a_late_answer_is_a_failure() -> None:
    """The endpoint's time is bounded."""

    async def late(_request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(5)
        return httpx.Response(200)

    judge = HttpJudge(_ENDPOINT, httpx.MockTransport(late))
    with pytest.raises(JudgeFailedError):
        await judge.ask("t", "some text", _BOTH)
    await judge.close()


async def test_too_many_questions_fail_at_once() -> None:
    """As many as are asked may wait; of more, those of who has most fail, and turns are taken."""
    gate, asked = asyncio.Event(), []

    async def waits(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content)["messages"][1]["content"].splitlines()[1])
        await gate.wait()
        return _says('{"harm": false, "injection": false}')(request)

    endpoint = replace(_ENDPOINT, max_in_flight=2, timeout_s=10.0)
    judge = HttpJudge(endpoint, httpx.MockTransport(waits))
    flood = [asyncio.create_task(judge.ask("flood", str(idx), _BOTH)) for idx in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(JudgeFailedError):
        await judge.ask("flood", "too many", _BOTH)
    other = asyncio.create_task(judge.ask("other", "one", _BOTH))
    with pytest.raises(JudgeFailedError):
        await flood.pop()
    gate.set()
    assert all(await asyncio.gather(other, *flood))
    assert asked == ["0", "1", "one", "2"]
    await judge.close()


async def test_the_text_is_data_between_marks() -> None:
    """The text stands in a message of its own between marks that are new each time."""
    seen: list[dict[str, object]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(json.loads(request.content))
        return _says('{"harm": false, "injection": false}')(request)

    await _ask(handler)
    await _ask(handler)
    users = [one["messages"][1]["content"] for one in seen]  # type: ignore[index]
    assert users[0] != users[1]
    assert all("\nsome text\n" in text for text in users)
