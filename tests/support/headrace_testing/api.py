"""A small client of the public API that shows everything an answer carries."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from headrace_testing.processes import ApiKey, Fleet

TIMEOUT = httpx.Timeout(120, connect=5)


@dataclass
class Answer:
    """One streamed chat answer as it came."""

    status: int
    headers: httpx.Headers
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    is_done: bool = False
    body: str = ""

    @property
    def text(self) -> str:
        """What the client has read."""
        return "".join(self.pieces)

    @property
    def replica(self) -> str:
        """The worker that started the answer."""
        return self.headers["x-headrace-replica"]


def chat(
    fleet: Fleet, key: ApiKey, content: str | list[dict[str, Any]], **fields: Any
) -> httpx.Response:
    """Ask for one whole chat answer, greedily."""
    return httpx.post(
        f"{fleet.base_url}/v1/chat/completions",
        json=body(fleet, content, **fields),
        headers=key.headers,
        timeout=TIMEOUT,
    )


def body(fleet: Fleet, content: str | list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """Return a chat request's body."""
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    return {
        "model": fleet.model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": 16,
        **fields,
    }


def stream(fleet: Fleet, key: ApiKey, content: str, **fields: Any) -> Iterator[Answer]:
    """Yield the growing answer after each event; leave the loop to leave the stream."""
    fields.setdefault("stream_options", {"include_usage": True})
    with httpx.stream(
        "POST",
        f"{fleet.base_url}/v1/chat/completions",
        json=body(fleet, content, stream=True, **fields),
        headers=key.headers,
        timeout=TIMEOUT,
    ) as response:
        answer = Answer(response.status_code, response.headers)
        if response.status_code != 200:
            answer.body = response.read().decode()
            yield answer
            return
        for line in response.iter_lines():
            if line.startswith("data: "):
                _take(answer, line.removeprefix("data: "))
                yield answer


def _take(answer: Answer, data: str) -> None:
    if data == "[DONE]":
        answer.is_done = True
        return
    event = json.loads(data)
    answer.error = event.get("error", answer.error)
    answer.usage = event.get("usage") or answer.usage
    for choice in event.get("choices", []):
        if piece := choice["delta"].get("content"):
            answer.pieces.append(piece)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def whole_stream(fleet: Fleet, key: ApiKey, content: str, **fields: Any) -> Answer:
    """Read a stream to its end."""
    *_, last = stream(fleet, key, content, **fields)
    return last


def cached_tokens(usage: dict[str, Any]) -> int:
    """Cached part of a usage object."""
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return cached


def metric(address: str, name: str) -> float:
    """Sum of all series of one metric at a service's metrics address."""
    text = httpx.get(f"http://{address}/metrics", timeout=10).text
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith((f"{name} ", f"{name}{{"))
    ]
    assert values, f"{name} is not exported at {address}"
    return sum(values)


def unique(text: str) -> str:
    """Mark a text so that no cache has seen it."""
    return f"Note {time.time_ns()}. {text}"
