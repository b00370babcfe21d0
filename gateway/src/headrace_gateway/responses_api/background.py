"""Responses made with nobody waiting at the other end.

::

    queued --> in_progress --> completed | incomplete | failed | cancelled
                  '-- its process dies --> the lease ends --> failed, when somebody looks
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging

from headrace_common.errors import HeadraceError, Internal, QueueFull
from headrace_common.lifecycle import cancel_and_wait
from headrace_gateway.answer_extras import Json
from headrace_gateway.captured_exchange import CapturedExchange
from headrace_gateway.request_flow import RequestFlow
from headrace_gateway.responses_api.kept import LEASE_S, KeptResponses
from headrace_gateway.state.store import Owner
from headrace_gateway.visit import Visit

_log = logging.getLogger(__name__)

# Somebody who cancels through another process waits so long at most.
_LOOK_S = 1.0
MAX_RUNNING = 256


class BackgroundResponses:
    """Runs responses on their own. Belongs to one event loop.

    Args:
        kept: where they are kept.
        flow: serves them like any other request.
    """

    def __init__(self, kept: KeptResponses, flow: RequestFlow) -> None:
        self._kept, self._flow = kept, flow
        self._running: dict[str, tuple[asyncio.Task[None], CapturedExchange]] = {}

    async def start(self, visit: Visit, response: Json, input_items: list[Json]) -> Json:
        """Keep a response as queued and begin to work on it; return it.

        Raises:
            QueueFull: too many are under way here.
            Unavailable: it cannot be kept now.
        """
        if len(self._running) >= MAX_RUNNING:
            raise QueueFull("Too many background responses are under way.", retry_after_s=1.0)
        response["status"] = "queued"
        owner = Owner.of(visit.principal)
        await self._kept.keep(owner, response, input_items, visit.request_id)
        exchange = CapturedExchange()
        detached = dataclasses.replace(visit, exchange=exchange)
        queued = dict(response)
        response["status"] = "in_progress"
        task = asyncio.create_task(self._run(detached, response))
        self._running[response["id"]] = (task, exchange)
        task.add_done_callback(lambda _: self._running.pop(response["id"], None))
        return queued

    def cancel(self, response_id: str) -> None:
        """Stop one at once if it runs here."""
        running = self._running.get(response_id)
        if running is not None:
            task, exchange = running
            exchange.client_is_gone = True
            task.cancel()

    async def close(self) -> None:
        """Stop all; they end as failed."""
        await cancel_and_wait(*(task for task, _ in self._running.values()))

    async def _run(self, visit: Visit, response: Json) -> None:
        looking = asyncio.create_task(self._look(response["id"]))
        try:
            await self._flow.serve(visit)
        except asyncio.CancelledError:
            is_wanted = visit.exchange.client_is_gone
            await asyncio.shield(
                self._fail(response, Internal(), "cancelled" if is_wanted else "failed")
            )
            raise
        except HeadraceError as error:
            await self._fail(response, error, "failed")
        except Exception:  # noqa: BLE001 - the edge: logged, and told without text from inside
            _log.exception("%s failed", visit.request_id)
            await self._fail(response, Internal(), "failed")
        finally:
            await cancel_and_wait(looking)

    async def _look(self, response_id: str) -> None:
        """Renew the lease, and stop when somebody wants that."""
        while True:
            await asyncio.sleep(min(_LOOK_S, LEASE_S / 3))
            try:
                if await self._kept.renew(response_id):
                    self.cancel(response_id)
            except HeadraceError as error:
                _log.warning("the lease of %s: %s", response_id, error)

    async def _fail(self, response: Json, error: HeadraceError, status: str) -> None:
        response["status"] = status
        if status == "failed":
            response["error"] = {"code": error.public_code, "message": error.public_message}
        try:
            await self._kept.finish(response)
        except HeadraceError as failure:
            # Its lease ends, and whoever looks then finds it failed.
            _log.warning("%s cannot be kept: %s", response["id"], failure)
