"""The one way to Redis: what is ready goes out together, without waiting for what went before.

Callers leave a function to be called with the reply, so a caller that goes away never cancels a
call in flight and can never leave a reply for the next one on the connection. No task stands
between a caller and Redis and no timer delays it: what was submitted in one turn of the loop is
sent at its end, in batches small enough that the first is answered while the next are under way.
All operations of a tenant in one batch are one call of the function. A breaker bounds the time to
decide::

    up --a batch fails or takes too long--> down: calls fail at once
     ^                                        |
     '---- library loaded, kept calls run ----'  tried every tenth of a second
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from headrace_common.awake import awake_timeout
from headrace_common.clock import Clock
from headrace_common.errors import HeadraceError
from headrace_common.lifecycle import cancel_and_wait, raise_if_cancelled
from headrace_common.redis_pipeline import CommandPart, RedisPipeline
from headrace_ratelimit.metrics import RateLimitMetrics
from headrace_ratelimit.store import Op, Reply, call_args, library
from headrace_ratelimit.store_batch import (
    Batch,
    OnReply,
    Waiting,
    by_tenant,
    check_loaded,
    is_not_loaded,
    spread,
)

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
MAX_BATCH = 8
# Batches under way; more operations wait here and go out in fuller ones.
MAX_IN_FLIGHT = 8
MAX_KEPT = 50_000
_MAX_KEPT_BATCH = 128
_RETRY_S = 0.1
# Background work on a server that just came back may take longer than a request may wait.
_REVIVE_TIMEOUT_S = 2.0
# A time-out that is noticed this late says that this process did not run, not that Redis did not.
_STALL_S = 0.01
_MAX_STALLS = 3


class StoreDownError(HeadraceError):
    """Redis does not answer now. Never leaves this service: the local share decides instead.

    Args:
        public_message: see `HeadraceError`.
        may_have_run: the operation was sent.
    """

    reason = "STORE_DOWN"

    def __init__(self, public_message: str, *, may_have_run: bool = False) -> None:
        super().__init__(public_message)
        self.may_have_run = may_have_run


async def answered(start: Callable[[Callable[[Answer | HeadraceError], None]], None]) -> Answer:
    """Start what hands its answer to a function, and wait; leaving does not call it back."""
    answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def done(result: Answer | HeadraceError) -> None:
        if answer.done():
            return
        if isinstance(result, HeadraceError):
            answer.set_exception(result)
        else:
            answer.set_result(result)

    start(done)
    return await answer


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
        self._library = library()
        self._queue: deque[Waiting] = deque()
        self._in_flight: set[Batch] = set()
        self._is_flushing = False
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()
        self._went_down = asyncio.Event()
        self._kept: deque[Op] = deque()
        self._redis: RedisPipeline | None = None
        self._is_up = False
        self._loop: asyncio.AbstractEventLoop
        self._task: asyncio.Task[None] | None = None
        self._last_failure = ""

    @property
    def is_up(self) -> bool:
        """Whether Redis answered last time."""
        return self._is_up

    async def start(self) -> None:
        """Try to connect once, then serve; a server that is down is waited for meanwhile."""
        self._loop = asyncio.get_running_loop()
        self._metrics.degraded.set(1)
        await self._try_revive()
        self._task = asyncio.create_task(self._revive_forever())

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
            self._queue.append(Waiting(op, on_reply, must_run))
            if not self._is_flushing:
                self._is_flushing = True
                self._is_quiet.clear()
                self._loop.call_soon(self._flush)
            return
        if must_run:
            self._keep(op)
        on_reply(StoreDownError(self._last_failure))

    async def call(self, op: Op, *, must_run: bool = False) -> Reply:
        """Run one operation; cancelling the wait does not call it back.

        Raises:
            StoreDownError, Internal: see `submit`.
        """
        return await answered(lambda on_reply: self.submit(op, on_reply, must_run=must_run))

    async def _revive_forever(self) -> None:
        while True:
            if self._is_up:
                await self._went_down.wait()
            await self._try_revive()
            raise_if_cancelled()
            if not self._is_up:
                await asyncio.sleep(_RETRY_S)

    def _flush(self) -> None:
        self._is_flushing = False
        while self._is_up and self._queue and len(self._in_flight) < MAX_IN_FLIGHT:
            size = min(MAX_BATCH, len(self._queue))
            batch = Batch([self._queue.popleft() for _ in range(size)], self._clock.now_s())
            self._in_flight.add(batch)
            self._send(batch)
        if not self._queue and not self._in_flight:
            self._is_quiet.set()

    def _send(self, batch: Batch) -> None:
        commands = self._commands([[batch.waiting[i].op for i in it] for it in batch.groups])
        if batch.is_second_try:
            commands.insert(0, self._load_command())
        try:
            replies = self._connection().send(commands)
        except OSError as error:
            self._go_down(error)
            return
        batch.timer = self._loop.call_later(
            self._timeout_s, self._on_late, batch, self._loop.time() + self._timeout_s
        )
        replies.add_done_callback(functools.partial(self._on_done, batch))

    def _on_late(self, batch: Batch, due_s: float) -> None:
        now_s = self._loop.time()
        if now_s - due_s >= _STALL_S and batch.stalls < _MAX_STALLS:
            batch.stalls += 1
            due_s = now_s + self._timeout_s
            batch.timer = self._loop.call_later(self._timeout_s, self._on_late, batch, due_s)
            return
        self._go_down(TimeoutError(f"no answer within {self._timeout_s} s"))

    def _on_done(self, batch: Batch, replies: asyncio.Future[list[Reply]]) -> None:
        if batch.timer is not None:
            batch.timer.cancel()
        if batch not in self._in_flight:
            # Given up already.
            return
        error = replies.exception()
        if isinstance(error, OSError):
            self._go_down(error)
            return
        try:
            self._take(batch, replies.result())
        except OSError as refusal:
            self._go_down(refusal)
            return
        if self._queue or not self._in_flight:
            self._flush()

    def _take(self, batch: Batch, results: list[Reply]) -> None:
        if batch.is_second_try:
            check_loaded(results.pop(0))
        elif any(is_not_loaded(it) for it in results):
            self._try_again(batch, results)
            return
        # Before anybody is answered: if the server cannot serve, all get that for an answer.
        replies = list(spread(batch.groups, results))
        self._in_flight.discard(batch)
        self._metrics.batch_calls.observe(len(batch.waiting))
        self._metrics.store_duration_s.observe(self._clock.now_s() - batch.started_s)
        for i, reply in replies:
            batch.waiting[i].on_reply(reply)

    def _try_again(self, batch: Batch, results: list[Reply]) -> None:
        """Load the library and run what was not run."""
        again = {
            i
            for group, result in zip(batch.groups, results, strict=True)
            for i in group
            if is_not_loaded(result)
        }
        replies = list(spread(batch.groups, results))
        self._in_flight.discard(batch)
        for i, reply in replies:
            if i not in again:
                batch.waiting[i].on_reply(reply)
        second = Batch([it for i, it in enumerate(batch.waiting) if i in again], batch.started_s)
        second.is_second_try = True
        self._in_flight.add(second)
        self._send(second)

    def _commands(self, calls: Iterable[list[Op]]) -> list[list[CommandPart]]:
        commands: list[list[CommandPart]] = []
        for ops in calls:
            key, *args = call_args(ops, has_ledger=self._has_ledger)
            commands.append(["FCALL", self._library.name, 1, key, *args])
        return commands

    def _load_command(self) -> list[CommandPart]:
        return ["FUNCTION", "LOAD", "REPLACE", self._library.text]

    def _connection(self) -> RedisPipeline:
        if self._redis is None:
            raise ConnectionError("there is no connection to Redis")
        return self._redis

    async def _try_revive(self) -> None:
        try:
            async with awake_timeout(_REVIVE_TIMEOUT_S):
                self._redis = await RedisPipeline.connect(self._url, self._on_lost)
                check_loaded((await self._redis.send([self._load_command()]))[0])
            await self._run_kept()
        except (OSError, TimeoutError) as error:
            self._go_down(error)
            return
        self._is_up = True
        self._went_down.clear()
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
            # Off the queue, which may drop its oldest meanwhile.
            ops = [self._kept.popleft() for _ in range(min(_MAX_KEPT_BATCH, len(self._kept)))]
            groups = by_tenant(ops)
            try:
                async with awake_timeout(_REVIVE_TIMEOUT_S):
                    results = await self._connection().send(
                        self._commands([[ops[i] for i in group] for group in groups])
                    )
                # Looks for what says that the server cannot serve.
                list(spread(groups, results))
            except BaseException:
                self._kept.extendleft(reversed(ops))
                raise
            self._metrics.kept_settlements.set(len(self._kept))

    def _go_down(self, error: Exception) -> None:
        self._is_up = False
        self._went_down.set()
        text = f"{type(error).__name__}: {error}"
        if text != self._last_failure:
            _log.warning("Redis does not answer, the local share decides: %s", text)
        self._last_failure = text
        self._metrics.degraded.set(1)
        self._metrics.store_failures.inc()
        batches, self._in_flight = self._in_flight, set()
        for batch in batches:
            if batch.timer is not None:
                batch.timer.cancel()
        self._disconnect()
        self._fail([it for batch in batches for it in batch.waiting], were_sent=True)
        self._fail_queued()

    def _on_lost(self, error: Exception) -> None:
        """Connect again at once, not when the next request finds out."""
        if self._is_up:
            self._go_down(error)

    def _fail_queued(self) -> None:
        queued = list(self._queue)
        self._queue.clear()
        self._is_quiet.set()
        self._fail(queued, were_sent=False)

    def _fail(self, waiting: list[Waiting], *, were_sent: bool) -> None:
        for it in waiting:
            if it.must_run:
                self._keep(it.op)
            it.on_reply(StoreDownError(self._last_failure, may_have_run=were_sent))

    def _disconnect(self) -> None:
        redis, self._redis = self._redis, None
        if redis is not None:
            redis.close()
