"""The one way to Redis: a task owns the connection and sends what is ready as one batch.

Callers leave a function to be called with the reply, so a caller that goes away never cancels a
call in flight and can never leave a reply for the next one on the connection. All operations of a
tenant in one batch are one call of the script. A breaker bounds the time to decide::

    up --a batch fails or takes too long--> down: calls fail at once
     ^                                        |
     '---- script loaded, kept calls run -----'  tried every tenth of a second
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import hiredis

from headrace_common.clock import Clock
from headrace_common.errors import HeadraceError, Internal
from headrace_common.lifecycle import cancel_and_wait, raise_if_cancelled
from headrace_common.redis_pipeline import CommandPart, RedisPipeline
from headrace_ratelimit.metrics import RateLimitMetrics
from headrace_ratelimit.store import Op, Reply, script_args, sha1_of, source

_log = logging.getLogger(__name__)

MAX_BATCH = 128
MAX_KEPT = 50_000
_RETRY_S = 0.1
# Background work on a server that just came back may take longer than a request may wait.
_REVIVE_TIMEOUT_S = 2.0
# A time-out that is noticed this late says that this process did not run, not that Redis did not.
_STALL_S = 0.01
_MAX_STALLS = 3


class StoreDownError(HeadraceError):
    """Redis does not answer now. Never leaves this service: the local share decides instead."""

    reason = "STORE_DOWN"


OnReply = Callable[[Reply | HeadraceError], None]


class _Waiting(NamedTuple):
    op: Op
    on_reply: OnReply
    must_run: bool


class Batcher:
    """Runs operations on Redis for many callers. Belongs to one event loop.

    Args:
        url: of the server.
        timeout_s: longest time for one batch.
        clock: for the duration metric.
        metrics: see `RateLimitMetrics`.
        has_ledger: budgets that are missing are asked for, not taken for unused.
        on_revived: called whenever Redis begins to answer.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float,
        clock: Clock,
        metrics: RateLimitMetrics,
        *,
        has_ledger: bool = False,
        on_revived: Callable[[], None] = lambda: None,
    ) -> None:
        self._url, self._timeout_s, self._has_ledger = url, timeout_s, has_ledger
        self._clock, self._metrics, self._on_revived = clock, metrics, on_revived
        self._source = source()
        self._sha1 = sha1_of(self._source)
        self._queue: deque[_Waiting] = deque()
        self._filled = asyncio.Event()
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()
        self._kept: deque[Op] = deque()
        self._redis: RedisPipeline | None = None
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
                await self._is_quiet.wait()
        await cancel_and_wait(self._task)
        self._fail_queued()
        self._disconnect()
        if self._kept:
            _log.warning("%d settlements are left to the ledger", len(self._kept))

    def submit(self, op: Op, on_reply: OnReply, *, must_run: bool = False) -> None:
        """Run one operation and call *on_reply* once, maybe at once.

        Args:
            op: what to do.
            on_reply: gets the reply, `StoreDownError` (Redis is down or did not answer in time; the
                operation may have run) or `Internal` (the script failed). Must be quick.
            must_run: if Redis does not answer, run it (again) once it does. For operations that
                are safe to run twice.
        """
        if self._is_up:
            self._queue.append(_Waiting(op, on_reply, must_run))
            self._filled.set()
            self._is_quiet.clear()
            return
        if must_run:
            self._keep(op)
        on_reply(StoreDownError(self._last_failure))

    async def call(self, op: Op, *, must_run: bool = False) -> Reply:
        """Run one operation; cancelling the wait does not call it back.

        Raises:
            StoreDownError, Internal: see `submit`.
        """
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        def on_reply(result: Reply | HeadraceError) -> None:
            if reply.done():
                return
            if isinstance(result, HeadraceError):
                reply.set_exception(result)
            else:
                reply.set_result(result)

        self.submit(op, on_reply, must_run=must_run)
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
            if not self._is_up:
                continue
            batch = [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]
            if not self._queue:
                self._filled.clear()
            if batch:
                await self._run_batch(batch)
            if not self._queue:
                self._is_quiet.set()
            raise_if_cancelled()

    async def _run_batch(self, batch: list[_Waiting]) -> None:
        started_s = self._clock.now_s()
        try:
            replies = await self._execute([it.op for it in batch], self._timeout_s)
        except (OSError, TimeoutError) as error:
            self._go_down(error, batch)
            return
        self._metrics.batch_calls.observe(len(batch))
        self._metrics.store_duration_s.observe(self._clock.now_s() - started_s)
        for waiting, reply in zip(batch, replies, strict=True):
            waiting.on_reply(reply)

    async def _execute(self, ops: list[Op], timeout_s: float) -> list[Reply | HeadraceError]:
        """Run operations, one script call per tenant; a failed call's replies are `Internal`.

        Raises:
            OSError, TimeoutError: the server cannot serve.
        """
        groups: dict[str, list[int]] = {}
        for idx, op in enumerate(ops):
            groups.setdefault(op.tenant_id, []).append(idx)
        calls = [[ops[idx] for idx in group] for group in groups.values()]
        results = await self._run(calls, timeout_s)
        replies: list[Reply | HeadraceError] = [None] * len(ops)
        for group, result in zip(groups.values(), results, strict=True):
            if isinstance(result, hiredis.ReplyError):
                _check_is_script_failure(result)
                _log.error("the script failed: %s", result)
                result = [Internal() for _ in group]
            for idx, reply in zip(group, result, strict=True):
                replies[idx] = reply
        return replies

    async def _run(self, calls: list[list[Op]], timeout_s: float) -> list[Reply]:
        replies = await _bounded(self._send(calls), timeout_s)
        forgotten = [i for i, reply in enumerate(replies) if _is_no_script(reply)]
        if forgotten:
            await self._load_script(timeout_s)
            again = await _bounded(self._send([calls[i] for i in forgotten]), timeout_s)
            for i, reply in zip(forgotten, again, strict=True):
                replies[i] = reply
        return replies

    def _send(self, calls: Iterable[list[Op]]) -> asyncio.Future[list[Reply]]:
        commands: list[list[CommandPart]] = []
        for ops in calls:
            key, *args = script_args(ops, has_ledger=self._has_ledger)
            commands.append(["EVALSHA", self._sha1, 1, key, *args])
        return self._connection().send(commands)

    async def _load_script(self, timeout_s: float) -> None:
        loading = self._connection().send([["SCRIPT", "LOAD", self._source]])
        (reply,) = await _bounded(loading, timeout_s)
        if isinstance(reply, hiredis.ReplyError):
            raise ConnectionError(f"Redis does not take the script: {reply}")

    def _connection(self) -> RedisPipeline:
        if self._redis is None:
            raise ConnectionError("there is no connection to Redis")
        return self._redis

    async def _try_revive(self) -> None:
        try:
            async with asyncio.timeout(_REVIVE_TIMEOUT_S):
                self._redis = await RedisPipeline.connect(self._url, self._on_lost)
            await self._load_script(_REVIVE_TIMEOUT_S)
            await self._run_kept()
        except (OSError, TimeoutError) as error:
            self._go_down(error, [])
            return
        self._is_up = True
        self._metrics.degraded.set(0)
        if self._last_failure:
            _log.warning("Redis answers again")
        self._last_failure = ""
        self._on_revived()

    def _keep(self, op: Op) -> None:
        if len(self._kept) >= MAX_KEPT:
            self._kept.popleft()
            self._metrics.dropped_settlements.inc()
        self._kept.append(op)
        self._metrics.kept_settlements.set(len(self._kept))

    async def _run_kept(self) -> None:
        while self._kept:
            ops = [self._kept[idx] for idx in range(min(MAX_BATCH, len(self._kept)))]
            await self._execute(ops, _REVIVE_TIMEOUT_S)
            for _ in ops:
                self._kept.popleft()
            self._metrics.kept_settlements.set(len(self._kept))

    def _go_down(self, error: Exception, batch: list[_Waiting]) -> None:
        self._is_up = False
        text = f"{type(error).__name__}: {error}"
        if text != self._last_failure:
            _log.warning("Redis does not answer, the local share decides: %s", text)
        self._last_failure = text
        self._metrics.degraded.set(1)
        self._metrics.store_failures.inc()
        self._disconnect()
        self._fail(batch)
        self._fail_queued()

    def _on_lost(self, error: Exception) -> None:
        """Connect again at once, not when the next request finds out."""
        if self._is_up:
            self._go_down(error, [])
            self._filled.set()

    def _fail_queued(self) -> None:
        queued = list(self._queue)
        self._queue.clear()
        self._filled.clear()
        self._fail(queued)

    def _fail(self, batch: list[_Waiting]) -> None:
        for waiting in batch:
            if waiting.must_run:
                self._keep(waiting.op)
            waiting.on_reply(StoreDownError(self._last_failure))

    def _disconnect(self) -> None:
        redis, self._redis = self._redis, None
        if redis is not None:
            redis.close()


async def _bounded(replies: asyncio.Future[list[Reply]], timeout_s: float) -> list[Reply]:
    """Wait for replies, at most *timeout_s* of time in which this event loop was running.

    Raises:
        TimeoutError: it took longer; the connection is of no use any more.
        OSError: the connection broke.
    """
    loop = asyncio.get_running_loop()
    for _ in range(_MAX_STALLS + 1):
        due_s = loop.time() + timeout_s
        await asyncio.wait({replies}, timeout=timeout_s)
        if replies.done():
            return replies.result()
        if loop.time() - due_s < _STALL_S:
            break
    raise TimeoutError(f"no answer within {timeout_s} s")


def _is_no_script(reply: Reply) -> bool:
    return isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOSCRIPT")


def _check_is_script_failure(error: hiredis.ReplyError) -> None:
    """Pass a bug of ours or bad data; raise for a server that is loading, read-only or full.

    Raises:
        ConnectionError: the server cannot serve.
    """
    if "user_script" not in str(error):
        raise ConnectionError(str(error))
