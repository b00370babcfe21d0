"""What became of each request: kept here at once, and in the gateway's state a second later.

Nothing waits for the state: it is written in groups behind the requests, a bounded number a second.
What does not fit is still in this process's memory for a while, and the ledger has its cost. Until
somebody asks, or the state takes it, a story is facts as they came, and few objects: thousands wait
here, and the collector looks through all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from typing import NamedTuple

import orjson
from sqlalchemy import Connection, select

from headrace_common.bulk_rows import insert_missing_rows
from headrace_common.errors import Unavailable
from headrace_common.ids import first_request_id
from headrace_common.price_rows import cached_tokens
from headrace_contracts.usage.v1 import usage_pb2
from headrace_contracts.worker.v1.worker_pb2 import Timings
from headrace_gateway.answer_extras import Json
from headrace_gateway.model_routes.choice import ModelChoice
from headrace_gateway.state.schema import stories as table
from headrace_gateway.state.store import Owner, StateStore
from headrace_gateway.visit import Visit

# A quarter of a second at a time: the thread that writes holds the interpreter only briefly.
_FLUSH_S = 0.25
_IDLE_S = 1.0
_MAX_FLUSHED = 125
_MAX_REMEMBERED = 5_000
# Of a request that may just have ended: so often it is looked for until another gateway, which
# answered it, has written it. Requests that came in before that have ended long ago.
_TRIES = 8
_FRESH_S = 900


class _Facts(NamedTuple):
    """One request that is over."""

    tenant_id: str
    project_id: str
    # A `UsageEvent`, encoded.
    event: bytes
    stages_s: dict[str, float]
    queue_s: float | None
    # `Timings`, encoded; None = no worker told them.
    timings: bytes | None
    labels: Json
    route: ModelChoice | None
    # The client's own; empty = none.
    client_id: str

    def story(self) -> Json:
        """Return what its owner is told."""
        event = usage_pb2.UsageEvent.FromString(self.event)
        told = event_story(event)
        told["timing"] = {
            "duration_s": event.duration_s,
            "ttft_s": event.ttft_s or None,
            "queue_s": self.queue_s,
            "stages_s": self.stages_s,
            "worker": None if self.timings is None else _timings_story(self.timings),
        }
        told["client_request_id"] = self.client_id or None
        told["labels"] = self.labels
        told["route"] = None if self.route is None else self.route.story()
        output = "blocked" if event.ending == usage_pb2.ENDING_OUTPUT_BLOCKED else "passed"
        told["guard"] = {"input": "passed", "output": output}
        return told


class Stories:
    """The stories of all projects. Belongs to one event loop.

    Args:
        state: where they are kept.
        ttl_s: for how long.
    """

    def __init__(self, state: StateStore, ttl_s: int) -> None:
        self._state, self._ttl_s = state, ttl_s
        self._recent: OrderedDict[str, _Facts] = OrderedDict()
        # In order; the oldest are dropped when too many wait.
        self._waiting: deque[str] = deque(maxlen=_MAX_REMEMBERED)

    def add(self, visit: Visit, event: usage_pb2.UsageEvent) -> None:
        """Note a request that is over. Does no I/O."""
        first = visit.jobs[0] if visit.jobs else None
        self._recent[visit.request_id] = _Facts(
            visit.principal.tenant_id,
            visit.principal.project_id,
            event.SerializeToString(),
            visit.stages_s,
            None if first is None else first.queue_s,
            None if first is None or first.timings is None else first.timings.SerializeToString(),
            visit.request.labels,
            visit.choice,
            visit.exchange.client_id,
        )
        self._waiting.append(visit.request_id)
        if len(self._recent) > _MAX_REMEMBERED:
            self._recent.popitem(last=False)

    async def keep(self) -> None:
        """Write what waits, bit by bit; run under `supervise`."""
        while True:
            await asyncio.sleep(_FLUSH_S if self._waiting else _IDLE_S)
            await self.flush()

    async def flush(self) -> None:
        """Write what waits, up to a bound."""
        ids = [self._waiting.popleft() for _ in range(min(len(self._waiting), _MAX_FLUSHED))]
        expires_s = self._state.now_s() + self._ttl_s
        found = [(it, facts) for it in ids if (facts := self._recent.get(it)) is not None]
        if not found:
            return
        try:
            await self._state.write(lambda it: _write(it, found, expires_s))
        except Unavailable:
            if len(self._waiting) + len(ids) <= _MAX_REMEMBERED:
                self._waiting.extendleft(reversed(ids))
            raise

    async def close(self) -> None:
        """Write all that waits, if the state takes it; once `keep` has ended."""
        with contextlib.suppress(Unavailable):
            while self._waiting:
                await self.flush()

    async def find(self, owner: Owner, request_id: str) -> Json | None:
        """Return a request's story to its owner; None = there is none.

        One that is fresh by its id is waited for a moment: another gateway may have answered it.
        """
        found = self._recent.get(request_id)
        if found is not None:
            return found.story() if Owner(found.tenant_id, found.project_id) == owner else None
        kept = await self._read(owner, request_id)
        now_s = self._state.now_s()
        first, last = (
            first_request_id(at_s * 1_000_000) for at_s in (now_s - _FRESH_S, now_s + 60)
        )
        tries = _TRIES if first < request_id < last else 0
        while kept is None and tries:
            tries -= 1
            await asyncio.sleep(_FLUSH_S)
            kept = await self._read(owner, request_id)
        return kept

    async def _read(self, owner: Owner, request_id: str) -> Json | None:
        return await self._state.read(lambda it: _kept(it, owner, request_id), owner.tenant_id)


def _write(connection: Connection, found: list[tuple[str, _Facts]], expires_s: int) -> None:
    rows = [
        (request_id, it.tenant_id, it.project_id, orjson.dumps(it.story()), expires_s)
        for request_id, it in found
    ]
    insert_missing_rows(connection, table, rows)


def _timings_story(encoded: bytes) -> Json:
    timings = Timings.FromString(encoded)
    return {
        "queue_s": timings.queue_s,
        "prefill_s": timings.prefill_s,
        "decode_s": timings.decode_s,
        "preemptions": timings.num_preemptions,
    }


def event_story(event: usage_pb2.UsageEvent) -> Json:
    """Return what the books know of a request. Pure."""
    usage = event.usage
    return {
        "id": event.request_id,
        "object": "request",
        "endpoint": event.endpoint,
        "model": event.model,
        "stream": event.streaming,
        "ended_at": event.occurred_unix_us // 1_000_000,
        "ending": usage_pb2.Ending.Name(event.ending).removeprefix("ENDING_").lower(),
        "tokens": {
            "prompt": usage.prompt_tokens,
            "cached": cached_tokens(usage),
            "output": usage.output_tokens,
        },
        "replicas": [ref.worker_id for ref in event.replicas],
        "resumes": max(0, len(event.replicas) - 1),
    }


def _kept(connection: Connection, owner: Owner, request_id: str) -> Json | None:
    asked = select(table.c.story).where(
        table.c.request_id == request_id,
        table.c.tenant_id == owner.tenant_id,
        table.c.project_id == owner.project_id,
    )
    found = connection.scalar(asked)
    return None if found is None else orjson.loads(found)
