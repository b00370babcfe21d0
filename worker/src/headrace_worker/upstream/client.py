"""HTTP to the server: streams, health and load. Owns the connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from headrace_common.errors import (
    ContextTooLong,
    HeadraceError,
    InvalidRequest,
    QueueFull,
    ReplicaLost,
    Unavailable,
)

_log = logging.getLogger(__name__)

Json = dict[str, Any]  # Any: JSON values
_MAX_LINE_BYTES = 8 << 20
_MAX_ERROR_BYTES = 64 << 10
_PROBE_TIMEOUT_S = 5.0
# How OpenAI, vLLM and SGLang, and llama.cpp say that a prompt is too long.
_CONTEXT_WORDS = ("context length", "context size", "maximum context")
# What servers call the same two numbers.
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")


@dataclass(frozen=True)
class UpstreamModel:
    """What the server says of a model."""

    context_tokens: int = 0
    created_unix_s: int = 0


@dataclass(frozen=True)
class UpstreamLoad:
    """Requests at the server, whoever sent them; None = it does not tell."""

    num_running: int | None = None
    num_waiting: int | None = None


class UpstreamClient:
    """One server.

    Args:
        url: base URL, such as http://host:8000/v1.
        api_key: empty = none. Never logged.
        connect_timeout_s: longest wait for a connection.
        silence_timeout_s: longest wait between two pieces of an answer.
    """

    def __init__(
        self, url: str, api_key: str, connect_timeout_s: float, silence_timeout_s: float
    ) -> None:
        self._url = url.rstrip("/")
        self._root = self._url.removesuffix("/v1")
        # Events are read as they come over the wire, so nothing may be compressed.
        headers = {"Accept-Encoding": "identity"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        # Why the server is away, for the log; empty = it is there.
        self.trouble = ""
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(silence_timeout_s, connect=connect_timeout_s, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )
        self._leaving: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def stream(
        self, path: str, body: Json, request_id: str
    ) -> AsyncIterator[AsyncIterator[Json]]:
        """Send a request; yield the chunks of its answer. Leaving closes the connection.

        Raises:
            HeadraceError: it was refused, or the server cannot be reached.
        """
        try:
            response = await self._send(path, body, request_id)
            try:
                if response.status_code != 200:
                    raise await _refusal(response)
                yield _chunks(response)
            finally:
                await self._undisturbed(response.aclose())
        except httpx.TimeoutException as error:
            raise Unavailable("The engine behind this model does not answer.") from error
        except httpx.HTTPError as error:
            _log.info("%s: the upstream was lost: %r", request_id, error)
            raise ReplicaLost("The engine behind this model was lost.") from error

    async def _send(self, path: str, body: Json, request_id: str) -> httpx.Response:
        """Send a request, wait for the head of its answer.

        Where a cancellation strikes while httpcore opens, sends on or closes a connection, it stays
        open for ever. So the sending is left alone until the server has everything.
        """
        is_sent = asyncio.Event()

        async def note(event: str, _info: Json) -> None:
            if event == "http11.send_request_body.complete":
                is_sent.set()

        request = self._http.build_request(
            "POST",
            self._url + path,
            json=body,
            headers={"x-request-id": request_id},
            extensions={"trace": note},
        )
        sending = asyncio.create_task(self._http.send(request, stream=True))
        sending.add_done_callback(lambda _: is_sent.set())
        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:
            self._in_background(_give_up(sending, is_sent))
            raise

    async def _undisturbed(self, work: Coroutine[Any, Any, None]) -> None:  # Any: what it awaits
        """Wait for *work*, which goes on to its end if the caller is cancelled."""
        await asyncio.shield(self._in_background(work))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return task

    async def fetch_model(self, name: str) -> UpstreamModel | None:
        """Return what the server says of a model; None = it does not serve it, or not now."""
        try:
            answer = await self._http.get(f"{self._url}/models", timeout=_PROBE_TIMEOUT_S)
            if answer.status_code in (404, 405):
                health = await self._http.get(f"{self._root}/health", timeout=_PROBE_TIMEOUT_S)
                health.raise_for_status()
                self.trouble = ""
                return UpstreamModel()
            answer.raise_for_status()
            for model in answer.json()["data"]:
                if model["id"] == name:
                    self.trouble = ""
                    return UpstreamModel(read_context(model), int(model.get("created") or 0))
            self.trouble = f"there, without the model {name!r}"
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            self.trouble = f"away: {error!r}"
        return None

    async def fetch_load(self) -> UpstreamLoad:
        """Return the server's own load, where its /metrics tells it."""
        try:
            answer = await self._http.get(f"{self._root}/metrics", timeout=_PROBE_TIMEOUT_S)
            answer.raise_for_status()
        except httpx.HTTPError:
            return UpstreamLoad()
        return read_load(answer.text)

    async def close(self) -> None:
        """Drop the connections."""
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await self._http.aclose()


async def _give_up(sending: asyncio.Task[httpx.Response], is_sent: asyncio.Event) -> None:
    """Close the connection of a request that nobody waits for, once it has been sent."""
    await is_sent.wait()
    sending.cancel()
    with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
        await (await sending).aclose()


def read_load(text: str) -> UpstreamLoad:
    """Read the two numbers out of a page of Prometheus metrics. Pure."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name = line.split("{", 1)[0].split(" ", 1)[0]
        if name in _RUNNING or name in _WAITING:
            try:
                value = float(line.rsplit(" ", 1)[1])
            except (IndexError, ValueError):
                continue
            if not math.isfinite(value):
                continue
            found[name] = found.get(name, 0.0) + value

    def first(names: tuple[str, ...]) -> int | None:
        return next((int(found[name]) for name in names if name in found), None)

    return UpstreamLoad(first(_RUNNING), first(_WAITING))


async def _chunks(response: httpx.Response) -> AsyncIterator[Json]:
    """Yield the JSON of each event until [DONE]; an end without it is a loss.

    Lines are cut here, from what the connection brings in one piece: httpx's own lines cost more
    than everything else that is done with an event.
    """
    rest, data = b"", list[bytes]()
    async for piece in response.aiter_raw():
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            raise _no_known_form()
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                text, data = b"\n".join(data), []
                if text == b"[DONE]":
                    return
                yield _json_object(text)
    raise ReplicaLost("The engine behind this model ended in mid-answer.")


def _json_object(text: bytes) -> Json:
    try:
        chunk = json.loads(text)
    except ValueError as error:
        raise _no_known_form() from error
    if not isinstance(chunk, dict):
        raise _no_known_form()
    return chunk


def read_context(model: dict[str, Any]) -> int:
    """Return a model's context in tokens, as vLLM, Headrace or llama.cpp tell it; 0 = not told."""
    meta = model.get("meta")
    of_a_slot = meta.get("n_ctx") if isinstance(meta, dict) else 0
    return int(model.get("max_model_len") or model.get("context_window") or of_a_slot or 0)


def _no_known_form() -> Unavailable:
    return Unavailable("The engine behind this model answers in no known form.")


async def _refusal(response: httpx.Response) -> HeadraceError:
    body = b""
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > _MAX_ERROR_BYTES:
            break
    return read_refusal(response.status_code, body, _seconds(response.headers.get("retry-after")))


def read_refusal(status: int, body: bytes, retry_after_s: float | None) -> HeadraceError:
    """Translate the server's refusal; of its text only that of wrong requests goes further."""
    message, param, code = _told(body)
    if status in (429, 529):
        return QueueFull(
            "The engine behind this model is full.", retry_after_s=retry_after_s or 1.0
        )
    if status in (401, 403):
        _log.error("the upstream refuses our key: %d", status)
        return Unavailable("The engine behind this model refuses us.", retry_after_s=30.0)
    if status == 404:
        # The fleet told clients of the model: not their mistake, and another replica may know it.
        _log.error("the upstream knows neither our model nor the path: %s", message)
        return Unavailable("The engine behind this model does not know it.", retry_after_s=1.0)
    if status in (400, 413, 422):
        is_of_context = any(words in message.lower() for words in _CONTEXT_WORDS)
        if code == "context_length_exceeded" or is_of_context:
            return ContextTooLong(message, param=param)
        return InvalidRequest(message, param=param)
    if status < 500:
        # A redirect, an intruder on its port: not what the client asked for is wrong.
        _log.error("the upstream answers with status %d", status)
    return Unavailable("The engine behind this model failed.", retry_after_s=1.0)


def _told(body: bytes) -> tuple[str, str | None, str]:
    fallback = "The engine behind this model refuses the request."
    try:
        said = json.loads(body)
        said = said.get("error", said)
        if isinstance(said, str):
            return said[:500], None, ""
        message = str(said.get("message") or fallback)[:500]
        param = said.get("param")
        return message, param if isinstance(param, str) else None, str(said.get("code") or "")
    except (ValueError, AttributeError):
        return fallback, None, ""


def _seconds(value: str | None) -> float | None:
    try:
        return None if value is None else max(0.0, min(float(value), 3600.0))
    except ValueError:
        return None
