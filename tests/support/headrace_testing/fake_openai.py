"""The smallest OpenAI-compatible server: real HTTP, one model, words at a chosen pace.

async with FakeOpenAi() as server:
    UpstreamSettings(url=server.url, model=server.model)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

WORDS = ("the ", "water ", "turns ", "a ", "wheel")


class FakeOpenAi:
    """Serves `/v1/models`, `/v1/chat/completions` and `/v1/completions`, streams only.

    Args:
        model: its one model.
        delay_per_word_s: time before each word.
    """

    def __init__(self, model: str = "their-model", delay_per_word_s: float = 0.0) -> None:
        self.model, self.delay_per_word_s = model, delay_per_word_s
        # For tests to look at: bodies in order, and how many streams run.
        self.bodies: list[dict[str, Any]] = []
        self.num_running = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Base URL of the API."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def __aenter__(self) -> FakeOpenAi:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, then close: enough HTTP/1.1 for a client that keeps to it."""
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lengths = [
                    int(line.split(":")[1])
                    for line in head.splitlines()
                    if line.lower().startswith("content-length:")
                ]
                body = await reader.readexactly(lengths[0]) if lengths else b""
                await self._answer(head.split(" ")[1], body, reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(
        self, path: str, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if path == "/v1/models":
            return _send(writer, 200, {"data": [{"id": self.model, "max_model_len": 4096}]})
        if path not in ("/v1/chat/completions", "/v1/completions"):
            return _send(writer, 404, {"error": {"message": "no such path"}})
        asked = json.loads(body)
        self.bodies.append(asked)
        writer.write(
            b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\n"
        )
        gone = asyncio.create_task(reader.read(1))
        self.num_running += 1
        try:
            await self._stream(asked, writer, gone)
        finally:
            self.num_running -= 1
            gone.cancel()
        return None

    async def _stream(
        self, asked: dict[str, Any], writer: asyncio.StreamWriter, gone: asyncio.Task[bytes]
    ) -> None:
        is_chat = "messages" in asked
        num = min(len(WORDS), asked["max_tokens"])
        for word in WORDS[:num]:
            await asyncio.wait({gone}, timeout=self.delay_per_word_s or 0.0001)
            if gone.done():
                return
            _event(writer, {"choices": [_choice(word, None, is_chat=is_chat)]})
            await writer.drain()
        reason = "stop" if num == len(WORDS) else "length"
        _event(writer, {"choices": [_choice("", reason, is_chat=is_chat)]})
        _event(writer, {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": num}})
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()


def _choice(text: str, reason: str | None, *, is_chat: bool) -> dict[str, Any]:
    said = {"delta": {"content": text}} if is_chat else {"text": text}
    return {"index": 0, **said, "finish_reason": reason}


def _event(writer: asyncio.StreamWriter, chunk: dict[str, Any]) -> None:
    writer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


def _send(writer: asyncio.StreamWriter, status: int, said: dict[str, Any]) -> None:
    body = json.dumps(said).encode()
    head = f"HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
