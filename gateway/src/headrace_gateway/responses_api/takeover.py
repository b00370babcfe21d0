"""Goes on with background responses whose process has died, or was stopped before their end.

Each is made anew from its beginning, under the request id that it had: with the same seed, so that
who has read some of its events reads on in the same text (`resumed_log`), and with one bill
(`tries_log`). It is judged, limited and priced as any request, by its key as that is now.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from headrace_common.errors import HeadraceError, ModelNotFound, Unavailable
from headrace_gateway.answer_extras import Json
from headrace_gateway.auth import KeyAuth
from headrace_gateway.responses_api.background import BackgroundResponses, Run
from headrace_gateway.responses_api.dialect import ResponsesDialect
from headrace_gateway.responses_api.event_log import EventLog
from headrace_gateway.responses_api.kept import Claimed, KeptResponses
from headrace_gateway.responses_api.kept_events import KeptEvents
from headrace_gateway.responses_api.resumed_log import ResumedLog
from headrace_gateway.visit import Caller, Visit

_log = logging.getLogger(__name__)

_POLL_S = 2.0
# Between two tries to be admitted.
_RETRY_S = 1.0


class Takeover:
    """Claims responses and has them made. Belongs to one event loop.

    Args:
        kept: where they are.
        events: where those of streamed ones are.
        dialect: reads what they ask for.
        background: makes them.
        auth: whose key they came with.
        is_ready: whether a request could be answered now.
    """

    def __init__(
        self,
        kept: KeptResponses,
        events: KeptEvents,
        dialect: ResponsesDialect,
        background: BackgroundResponses,
        auth: KeyAuth,
        is_ready: Callable[[], bool],
    ) -> None:
        self._kept, self._events = kept, events
        self._dialect, self._background = dialect, background
        self._auth, self._is_ready = auth, is_ready

    async def keep(self) -> None:
        """Take over whatever there is, until cancelled; run under `supervise`."""
        while True:
            try:
                while self._is_ready() and self._background.has_room("") and await self._take_one():
                    pass
            except Unavailable as error:
                _log.info("no response can be looked for: %s", error)
            await asyncio.sleep(_POLL_S)

    async def _take_one(self) -> bool:
        claimed = await self._kept.claim()
        if claimed is None:
            return False
        response_id = claimed.response["id"]
        if self._background.goes_on(response_id, claimed.attempt):
            return True
        told, _ = await self._events.read(response_id, 0)
        if self._background.is_closing:
            await self._kept.release(response_id, claimed.attempt)
            return False
        _log.warning("%s was left by its process: begun anew", response_id)
        self._background.flow.metrics.taken_over.inc()
        keep_alive_s = self._background.flow.limits.keep_alive_s
        log = ResumedLog(response_id, keep_alive_s, claimed.attempt, told)
        queued: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        queued.set_result(claimed.response)
        claimed.response["status"] = "in_progress"
        serve = partial(self._serve, claimed, log)
        run = Run(claimed.request_id, claimed.tenant_id, claimed.response, log, serve, queued)
        self._background.run(run)
        return True

    async def _serve(self, claimed: Claimed, log: EventLog) -> None:
        """Serve it; what is refused for the moment only is tried again, as long as one may wait."""
        flow = self._background.flow
        give_up_s = flow.clock.now_s() + flow.limits.request_timeout_s
        visit: Visit | None = None
        while True:
            try:
                principal = await self._auth.resolve(claimed.work.key_id)
                caller = Caller(claimed.request_id, principal, log)
                reading = await self._dialect.read_again(claimed, caller)
                visit = Visit(
                    claimed.request_id,
                    principal,
                    log,
                    reading.request,
                    reading.make_sink,
                    flow.clock.now_s(),
                )
                await flow.serve(visit)
            except HeadraceError as error:
                # A model that is not known may be of a worker that starts as we did.
                may_help = error.retryable or isinstance(error, ModelNotFound)
                is_admitted = visit is not None and bool(visit.jobs)
                if not may_help or is_admitted or flow.clock.now_s() >= give_up_s:
                    raise
                _log.info("%s waits: %s", claimed.response["id"], error)
                await asyncio.sleep(max(_RETRY_S, error.retry_after_s or 0.0))
            else:
                return
