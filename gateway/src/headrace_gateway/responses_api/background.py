"""Responses made with nobody waiting at the other end.

::

    queued --> in_progress --> completed | incomplete | failed | cancelled
                  '-- its process dies --> the lease ends --> failed, when somebody looks

One is queued once it is admitted: what limits, budget, guard or context refuse is refused at once,
with a status that clients know what to do about, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from headrace_common.errors import HeadraceError, Internal, QueueFull
from headrace_common.lifecycle import cancel_and_wait
from headrace_gateway.answer_extras import Json
from headrace_gateway.rate_headers import is_limit_header
from headrace_gateway.request_flow import RequestFlow
from headrace_gateway.responses_api.event_log import EventLog
from headrace_gateway.responses_api.kept import Kept, KeptResponses
from headrace_gateway.responses_api.kept_events import KeptEvents
from headrace_gateway.state.store import Owner
from headrace_gateway.visit import Visit

_log = logging.getLogger(__name__)

# Somebody who cancels through another process waits so long at most.
_LOOK_S = 1.0
# Of one tenant's no more than are left to others: half of them, if they are the only ones.
MAX_RUNNING = 512


class BackgroundResponses:
    """Runs responses on their own. Belongs to one event loop.

    Args:
        kept: where they are kept.
        events: where the events of those that are streamed are kept.
        flow: serves them like any other request.
    """

    def __init__(self, kept: KeptResponses, events: KeptEvents, flow: RequestFlow) -> None:
        self._kept, self._events, self._flow = kept, events, flow
        self._running: dict[str, tuple[asyncio.Task[None], EventLog]] = {}
        # Those that run and those that are being kept before that, by tenant.
        self._under_way: Counter[str] = Counter()

    async def start(
        self, visit: Visit, response: Json, input_items: list[Json]
    ) -> tuple[Json, EventLog]:
        """Begin to work on a response; once it is kept, return it as queued and its events to come.

        Raises:
            QueueFull: too many are under way here.
            HeadraceError: it is not admitted, or cannot be kept now.
        """
        tenant_id = visit.principal.tenant_id
        if self._under_way[tenant_id] >= MAX_RUNNING - self._under_way.total():
            raise QueueFull("Too many background responses are under way.", retry_after_s=1.0)
        self._under_way[tenant_id] += 1
        log = EventLog(self._flow.limits.keep_alive_s)
        log.client_id = visit.exchange.client_id
        queued: asyncio.Future[Json] = asyncio.get_running_loop().create_future()

        async def queue() -> None:
            queued.set_result(await self._queue(visit, response, input_items, log))

        detached = dataclasses.replace(visit, exchange=log, on_admitted=queue)
        task = asyncio.create_task(self._run(detached, response, log, queued))
        self._running[response["id"]] = (task, log)
        task.add_done_callback(lambda _: self._running.pop(response["id"], None))
        task.add_done_callback(lambda _: self._end(tenant_id))
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
        return queued.result(), log

    def _end(self, tenant_id: str) -> None:
        self._under_way -= Counter({tenant_id: 1})

    async def _queue(
        self, visit: Visit, response: Json, input_items: list[Json], log: EventLog
    ) -> Json:
        response["status"] = "queued"
        owner = Owner.of(visit.principal)
        await self._kept.keep(owner, response, input_items, visit.request_id)
        queued = dict(response)
        if visit.request.streaming.is_stream:
            log.tell("response.created", queued)
            log.tell("response.queued", queued)
            await self._events.keep(response["id"], log)
        response["status"] = "in_progress"
        return queued

    def follow(
        self, find: Callable[[], Awaitable[Kept]], response_id: str, start: int
    ) -> AsyncIterator[bytes]:
        """Return the events of a response from a number on, wherever it is made."""
        if response_id in self._running:
            return self._running[response_id][1].follow(start)
        return self._events.follow(find, response_id, start)

    async def is_streamed(self, response_id: str) -> bool:
        """Whether a response has events to read."""
        return await self._events.has_any(response_id)

    def cancel(self, response_id: str) -> None:
        """Stop one at once if it runs here."""
        running = self._running.get(response_id)
        if running is not None:
            task, exchange = running
            exchange.client_is_gone = True
            task.cancel()

    async def close(self, grace_s: float) -> None:
        """Let those that run end within the grace; stop the others, which end as failed."""
        tasks = [task for task, _ in self._running.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=max(0.0, grace_s))
        await cancel_and_wait(*tasks)

    async def _run(
        self, visit: Visit, response: Json, log: EventLog, queued: asyncio.Future[Json]
    ) -> None:
        looking = asyncio.create_task(self._look(response, log, queued))
        try:
            await self._flow.serve(visit)
        except (Exception, asyncio.CancelledError) as error:
            if not queued.done():
                raise
            await self._end_early(visit, response, log, error)
        finally:
            await cancel_and_wait(looking)
            await asyncio.shield(self._keep_events(response["id"], log))

    async def _end_early(
        self, visit: Visit, response: Json, log: EventLog, error: BaseException
    ) -> None:
        if isinstance(error, asyncio.CancelledError):
            status = "cancelled" if visit.exchange.client_is_gone else "failed"
            await asyncio.shield(self._fail(response, Internal(), status, log))
            raise error
        if not isinstance(error, HeadraceError):
            # The edge: logged, and told without text from inside.
            _log.error("%s failed", visit.request_id, exc_info=error)
            error = Internal()
        await self._fail(response, error, "failed", log)

    async def _keep_events(self, response_id: str, log: EventLog) -> None:
        try:
            await self._events.keep(response_id, log)
        except HeadraceError as error:
            _log.warning("the events of %s: %s", response_id, error)

    async def _look(self, response: Json, log: EventLog, queued: asyncio.Future[Json]) -> None:
        """Renew the lease, tell how far it is, and stop when somebody wants that."""
        await asyncio.wait({queued})
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._keep_events(response["id"], log)
            try:
                if await self._kept.renew(response):
                    self.cancel(response["id"])
            except HeadraceError as error:
                _log.warning("the lease of %s: %s", response["id"], error)

    async def _fail(self, response: Json, error: HeadraceError, status: str, log: EventLog) -> None:
        response["status"] = status
        if status == "failed":
            response["error"] = {"code": error.public_code, "message": error.public_message}
        try:
            await self._kept.finish(response)
        except HeadraceError as failure:
            # Its lease ends, and whoever looks then finds it failed.
            _log.warning("%s cannot be kept: %s", response["id"], failure)
        if log.events:
            # There is no event of its own for what was cancelled; its status says so.
            log.tell("response.failed", response, is_last=True)
