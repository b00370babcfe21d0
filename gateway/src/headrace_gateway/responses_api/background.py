"""Responses made with nobody waiting at the other end.

::

    queued --> in_progress --> completed | incomplete | failed | cancelled
                 '-- its process dies, or may not go on --> another begins anew (`takeover`)

One is queued once it is admitted: what limits, budget, guard or context refuse is refused at once,
with a status that clients know what to do about, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace_common.errors import HeadraceError, Internal, QueueFull, Unavailable
from headrace_common.lifecycle import cancel_and_wait
from headrace_gateway.answer_extras import Json
from headrace_gateway.rate_headers import is_limit_header
from headrace_gateway.request_flow import RequestFlow
from headrace_gateway.responses_api.event_log import EventLog
from headrace_gateway.responses_api.kept import Hold, Kept, KeptResponses, Work
from headrace_gateway.responses_api.kept_events import KeptEvents
from headrace_gateway.state.store import Owner
from headrace_gateway.tries_log import TriesLog
from headrace_gateway.visit import Visit

_log = logging.getLogger(__name__)

# Somebody who cancels through another process waits so long at most.
_LOOK_S = 1.0
# Events gather for so long, over all responses, before they are kept and told.
_GATHER_S = 0.05
_AWAY_S = 0.5
# Of one tenant's no more than are left to others: half of them, if they are the only ones.
MAX_RUNNING = 512


@dataclass(eq=False, slots=True)
class Run:
    """One response that is made here.

    Args:
        request_id: of its request.
        tenant_id: whose.
        response: in its present state.
        log: where its answer and events go.
        serve: makes it.
        queued: done once it is kept.
    """

    request_id: str
    tenant_id: str
    response: Json
    log: EventLog
    serve: Callable[[], Awaitable[None]]
    queued: asyncio.Future[Json]
    task: asyncio.Task[None] | None = None

    def cancel(self, *, is_left: bool) -> None:
        """Stop it: for good, or so that another process goes on with it."""
        if is_left:
            self.log.leave()
        else:
            self.log.client_is_gone = True
        if self.task is not None:
            self.task.cancel()


class BackgroundResponses:
    """Runs responses on their own. Belongs to one event loop.

    Args:
        kept: where they are kept.
        events: where the events of those that are streamed are kept.
        flow: serves them like any other request.
    """

    def __init__(self, kept: KeptResponses, events: KeptEvents, flow: RequestFlow) -> None:
        self._kept, self._events = kept, events
        self._tries = TriesLog(flow.usage_log)
        # Serves tries of responses: `close_request` of its usage log is called at their end.
        self.flow = dataclasses.replace(flow, usage_log=self._tries)
        self._running: dict[str, Run] = {}
        # Those that run and those that are being kept before that, by tenant.
        self._under_way: Counter[str] = Counter()
        self._has_news = asyncio.Event()
        self._is_closing = False

    async def start(
        self, visit: Visit, response: Json, input_items: list[Json], work: Work
    ) -> Json:
        """Begin to work on a response; once it is kept, return it as queued.

        Raises:
            QueueFull: too many are under way here.
            HeadraceError: it is not admitted, or cannot be kept now.
        """
        tenant_id = visit.principal.tenant_id
        if not self.has_room(tenant_id):
            raise QueueFull("Too many background responses are under way.", retry_after_s=1.0)
        log = EventLog(response["id"], self.flow.limits.keep_alive_s)
        log.client_id = visit.exchange.client_id
        queued: asyncio.Future[Json] = asyncio.get_running_loop().create_future()

        async def queue() -> None:
            queued.set_result(await self._queue(visit, response, input_items, work, log))

        detached = dataclasses.replace(visit, exchange=log, on_admitted=queue)
        serve = partial(self.flow.serve, detached)
        task = self.run(Run(visit.request_id, tenant_id, response, log, serve, queued))
        either: set[asyncio.Future[Any]] = {task, queued}  # Any: their results are of two types
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not queued.done() and not task.done():
                # The client left, and nobody else knows its id.
                task.cancel()
        if not queued.done():
            # Why it was refused.
            await task
        limits = [it for it in log.headers if is_limit_header(it[0].decode())]
        visit.exchange.headers += limits
        return queued.result()

    @property
    def is_closing(self) -> bool:
        """Whether nothing may be begun here any more."""
        return self._is_closing

    def has_room(self, tenant_id: str) -> bool:
        """Whether one more of a tenant's may run here."""
        return self._under_way[tenant_id] < MAX_RUNNING - self._under_way.total()

    def goes_on(self, response_id: str, attempt: int) -> bool:
        """Whether it is made here, as if it had never been claimed anew; we were only slow."""
        run = self._running.get(response_id)
        if run is None or run.log.is_left:
            return False
        run.log.attempt = attempt
        return True

    def run(self, run: Run) -> asyncio.Task[None]:
        """Make a response, and see it through to its end."""
        self._under_way[run.tenant_id] += 1
        task = run.task = asyncio.create_task(self._run(run))
        self._running[run.log.response_id] = run
        task.add_done_callback(lambda _: self._end(run))
        return task

    def _end(self, run: Run) -> None:
        self._under_way -= Counter({run.tenant_id: 1})
        # One that was left may have been claimed anew, here, before its task had ended.
        if self._running.get(run.log.response_id) is run:
            del self._running[run.log.response_id]

    async def _queue(
        self, visit: Visit, response: Json, input_items: list[Json], work: Work, log: EventLog
    ) -> Json:
        response["status"] = "queued"
        owner = Owner.of(visit.principal)
        await self._kept.keep(owner, response, input_items, visit.request_id, work)
        queued = dict(response)
        if visit.request.streaming.is_stream:
            log.tell("response.created", queued)
            log.tell("response.queued", queued)
            await self._events.keep(log)
        response["status"] = "in_progress"
        return queued

    async def follow(
        self, find: Callable[[], Awaitable[Kept]], response_id: str, start: int
    ) -> AsyncIterator[bytes]:
        """Yield the events of a response from a number on, wherever it is made."""
        run = self._running.get(response_id)
        if run is not None:
            async for events in run.log.follow(start):
                yield events
            if not run.log.is_left:
                return
            start = max(start, run.log.num_kept)
        async for events in self._events.follow(find, response_id, start):
            yield events

    async def is_streamed(self, response_id: str) -> bool:
        """Whether a response has events to read."""
        return await self._events.has_any(response_id)

    def cancel(self, response_id: str) -> None:
        """Stop one at once if it runs here."""
        run = self._running.get(response_id)
        if run is not None:
            run.cancel(is_left=False)

    async def keep_events(self) -> None:
        """Keep what there is to tell, of all responses together; run under `supervise`."""
        while True:
            await self._has_news.wait()
            await asyncio.sleep(_GATHER_S)
            self._has_news.clear()
            logs = [run.log for run in self._running.values() if run.queued.done()]
            await self._until_there(partial(self._events.keep, *logs))

    async def close(self, grace_s: float) -> None:
        """Let those that run end within the grace; leave the others to another process."""
        self._is_closing = True
        tasks = [run.task for run in self._running.values() if run.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=max(0.0, grace_s))
        for run in self._running.values():
            run.cancel(is_left=True)
        await cancel_and_wait(*tasks)

    async def _run(self, run: Run) -> None:
        looking = asyncio.create_task(self._look(run))
        run.log.on_news = self._has_news.set
        try:
            await run.serve()
        except (Exception, asyncio.CancelledError) as error:
            if not run.queued.done():
                raise
            await asyncio.shield(self._end_early(run, error))
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            await cancel_and_wait(looking)
            await self._close(run)

    async def _close(self, run: Run) -> None:
        """Close the books, and tell the last events."""
        if run.log.is_left:
            self._tries.forget(run.request_id)
            return
        self._tries.close_request(run.request_id)
        if run.queued.done():
            await self._until_there(partial(self._events.keep, run.log))

    async def _end_early(self, run: Run, error: BaseException) -> None:
        response = run.response
        if run.log.is_left:
            try:
                await self._kept.release(response["id"], run.log.attempt)
            except HeadraceError as failure:
                _log.warning("the lease of %s ends by itself: %s", response["id"], failure)
        elif isinstance(error, asyncio.CancelledError):
            await self._fail(run, Internal(), "cancelled")
        elif isinstance(error, HeadraceError):
            await self._fail(run, error, "failed")
        else:
            # The edge: logged, and told without text from inside.
            _log.error("%s failed", run.request_id, exc_info=error)
            await self._fail(run, Internal(), "failed")

    async def _until_there(self, call: Callable[[], Awaitable[object]]) -> None:
        """Do it once the state is there; a process that ends does not wait for that."""
        while True:
            try:
                await call()
            except Unavailable as error:
                _log.warning("background responses: %s", error)
                if self._is_closing:
                    return
                await asyncio.sleep(_AWAY_S)
            else:
                return

    async def _look(self, run: Run) -> None:
        """Renew the lease, tell how far it is, and stop when somebody wants that."""
        await asyncio.wait({run.queued})
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                attempt = run.log.attempt
                hold = await self._kept.renew(run.response, attempt)
            except HeadraceError as error:
                _log.warning("the lease of %s: %s", run.response["id"], error)
            else:
                if hold is Hold.UNWANTED:
                    run.cancel(is_left=False)
                elif hold is Hold.LOST and attempt == run.log.attempt:
                    run.cancel(is_left=True)

    async def _fail(self, run: Run, error: HeadraceError, status: str) -> None:
        response, log = run.response, run.log
        response["status"] = status
        if status == "failed":
            response["error"] = {"code": error.public_code, "message": error.public_message}
        await self._until_there(lambda: self._kept.finish(response, log.attempt))
        if log.events:
            # There is no event of its own for what was cancelled; its status says so.
            log.tell("response.failed", response, is_last=True)
