"""The one way to Redis: a task owns the connection and sends what is ready as one pipeline.

Callers wait for futures, so a caller that goes away never cancels a call in flight and can never
leave a reply for the next one on the connection. A breaker bounds the time to decide::

    up --a batch fails or takes too long--> down: calls fail at once
     ^                                        |
     '---- scripts loaded, kept calls run ----'  tried every tenth of a second
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError, ResponseError

from headrace_common.clock import Clock
from headrace_common.errors import Internal
from headrace_common.lifecycle import cancel_and_wait, raise_if_cancelled
from headrace_common.redis_client import request_path_client
from headrace_ratelimit.metrics import RateLimitMetrics
from headrace_ratelimit.store import Command, Script, sha1_of, source_of

_log = logging.getLogger(__name__)

MAX_BATCH = 128
MAX_KEPT = 50_000
_RETRY_S = 0.1
# Background work on a server that just came back may take longer than a request may wait.
_REVIVE_TIMEOUT_S = 2.0

# The batch's own bound decides long before; this one ends tries to connect.
_SOCKET_TIMEOUT_S = 1.0
# A time-out that is noticed this late says that this process did not run, not that Redis did not.
_STALL_S = 0.01
_MAX_STALLS = 3

Reply = Any  # Any: what a script returns: a number or a list


class StoreDownError(Exception):
    """Redis does not answer now."""


@dataclass
class _Waiting:
    command: Command
    reply: asyncio.Future[Reply]
    must_run: bool


class Batcher:
    """Runs scripts on Redis for many callers. Belongs to one event loop.

    Args:
        url: of the server.
        timeout_s: longest time for one batch.
        clock: for the duration metric.
        metrics: see `RateLimitMetrics`.
    """

    def __init__(self, url: str, timeout_s: float, clock: Clock, metrics: RateLimitMetrics) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._clock, self._metrics = clock, metrics
        self._sources = {script: source_of(script) for script in Script}
        self._sha1s = {script: sha1_of(source) for script, source in self._sources.items()}
        self._queue: deque[_Waiting] = deque()
        self._filled = asyncio.Event()
        self._kept: deque[Command] = deque()
        self._redis: Redis | None = None
        self._is_up = False
        self._task: asyncio.Task[None] | None = None
        self._last_failure = ""

    @property
    def is_up(self) -> bool:
        """Whether Redis answered last time."""
        return self._is_up

    async def start(self) -> None:
        """Try to connect once, then serve; a server that is down is waited for meanwhile."""
        self._metrics.degraded.set(1)
        await self._try_revive()
        self._task = asyncio.create_task(self._serve_forever())

    async def close(self) -> None:
        """Run what is queued, if Redis answers, and disconnect."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s * 4):
                replies = [waiting.reply for waiting in self._queue]
                await asyncio.gather(*replies, return_exceptions=True)
        await cancel_and_wait(self._task)
        self._fail_queued()
        await self._disconnect()
        if self._kept:
            _log.warning("%d settlements are left to the ledger", len(self._kept))

    async def call(self, command: Command, *, must_run: bool = False) -> Reply:
        """Run one script.

        Args:
            command: the script and its arguments.
            must_run: if Redis does not answer, run it (again) once it does, whether or not the
                caller still waits. For scripts that are safe to run twice.

        Raises:
            StoreDownError: Redis is down or did not answer in time; the script may have run.
            Internal: the script failed.
        """
        if not self._is_up:
            if must_run:
                self._keep(command)
            raise StoreDownError(self._last_failure)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._queue.append(_Waiting(command, reply, must_run))
        self._filled.set()
        return await reply

    async def _serve_forever(self) -> None:
        while True:
            if not self._is_up:
                await self._try_revive()
                raise_if_cancelled()
            if not self._is_up:
                await asyncio.sleep(_RETRY_S)
                continue
            await self._filled.wait()
            batch = [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]
            if not self._queue:
                self._filled.clear()
            await self._run_batch(batch)
            raise_if_cancelled()

    async def _run_batch(self, batch: list[_Waiting]) -> None:
        started_s = self._clock.now_s()
        try:
            replies = await self._execute([w.command for w in batch], self._timeout_s)
        except (RedisError, OSError, TimeoutError) as error:
            await self._go_down(error, batch)
            return
        self._metrics.batch_calls.observe(len(batch))
        self._metrics.store_duration_s.observe(self._clock.now_s() - started_s)
        for waiting, reply in zip(batch, replies, strict=True):
            if waiting.reply.done():
                continue
            if isinstance(reply, Exception):
                waiting.reply.set_exception(Internal())
            else:
                waiting.reply.set_result(reply)

    async def _execute(self, commands: list[Command], timeout_s: float) -> list[Reply]:
        """Run the commands; a failed script's reply is its exception.

        Raises:
            RedisError, OSError, TimeoutError: the server cannot serve.
        """
        replies = await _bounded(self._run(commands), timeout_s)
        for reply in replies:
            if isinstance(reply, RedisError) and not _is_script_failure(reply):
                raise reply
            if isinstance(reply, Exception):
                _log.error("a script failed: %s", reply)
        return replies

    async def _run(self, commands: list[Command]) -> list[Reply]:
        replies = await self._pipeline(commands)
        forgotten = [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if forgotten:
            await self._load_scripts()
            again = await self._pipeline([commands[i] for i in forgotten])
            for i, reply in zip(forgotten, again, strict=True):
                replies[i] = reply
        return replies

    async def _pipeline(self, commands: list[Command]) -> list[Reply]:
        if self._redis is None:
            raise ConnectionError("there is no connection to Redis")
        async with self._redis.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.evalsha(self._sha1s[command.script], 1, command.key, *command.args)
            replies: list[Reply] = await pipe.execute(raise_on_error=False)
        return replies

    async def _load_scripts(self) -> None:
        if self._redis is None:
            raise ConnectionError("there is no connection to Redis")
        for source in self._sources.values():
            await self._redis.script_load(source)

    async def _try_revive(self) -> None:
        self._redis = request_path_client(self._url, max_connections=1, timeout_s=_SOCKET_TIMEOUT_S)
        try:
            async with asyncio.timeout(_REVIVE_TIMEOUT_S):
                await self._load_scripts()
            await self._run_kept()
        except (RedisError, OSError, TimeoutError) as error:
            await self._go_down(error, [])
            return
        self._is_up = True
        self._metrics.degraded.set(0)
        if self._last_failure:
            _log.warning("Redis answers again")
        self._last_failure = ""

    def _keep(self, command: Command) -> None:
        if len(self._kept) >= MAX_KEPT:
            self._kept.popleft()
            self._metrics.dropped_settlements.inc()
        self._kept.append(command)
        self._metrics.kept_settlements.set(len(self._kept))

    async def _run_kept(self) -> None:
        while self._kept:
            commands = list(itertools.islice(self._kept, MAX_BATCH))
            await self._execute(commands, _REVIVE_TIMEOUT_S)
            for _ in commands:
                self._kept.popleft()
            self._metrics.kept_settlements.set(len(self._kept))

    async def _go_down(self, error: Exception, batch: list[_Waiting]) -> None:
        self._is_up = False
        text = f"{type(error).__name__}: {error}"
        if text != self._last_failure:
            _log.warning("Redis does not answer, the local share decides: %s", text)
        self._last_failure = text
        self._metrics.degraded.set(1)
        self._metrics.store_failures.inc()
        self._fail(batch)
        self._fail_queued()
        await self._disconnect()

    def _fail_queued(self) -> None:
        self._fail(list(self._queue))
        self._queue.clear()
        self._filled.clear()

    def _fail(self, batch: list[_Waiting]) -> None:
        for waiting in batch:
            if waiting.must_run:
                self._keep(waiting.command)
            if not waiting.reply.done():
                waiting.reply.set_exception(StoreDownError(self._last_failure))

    async def _disconnect(self) -> None:
        redis, self._redis = self._redis, None
        if redis is not None:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await redis.aclose()


async def _bounded(work: Coroutine[Any, Any, list[Reply]], timeout_s: float) -> list[Reply]:
    """Wait for *work*, at most *timeout_s* of time in which this event loop was running.

    Raises:
        TimeoutError: it took longer; the work is cancelled.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    try:
        for _ in range(_MAX_STALLS + 1):
            due_s = loop.time() + timeout_s
            await asyncio.wait({task}, timeout=timeout_s)
            if task.done():
                return task.result()
            if loop.time() - due_s < _STALL_S:
                break
        raise TimeoutError(f"no answer within {timeout_s} s")
    finally:
        if not task.done():
            await cancel_and_wait(task)


def _is_script_failure(error: RedisError) -> bool:
    # A bug of ours or bad data, as opposed to a server that is loading, read-only or out of memory.
    return isinstance(error, ResponseError) and "user_script" in str(error)
