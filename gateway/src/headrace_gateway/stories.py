"""What became of each request: kept here at once, and in the gateway's state a second later.

Nothing waits for the state: it is written in groups behind the requests, a bounded number a second.
What does not fit is still in this process's memory for a while, and the ledger has its cost.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

import orjson
from sqlalchemy import Connection, select

from headrace_common.database import put
from headrace_contracts.usage.v1 import usage_pb2
from headrace_gateway.answer_extras import Json
from headrace_gateway.pricing import cached_tokens
from headrace_gateway.state.schema import stories as table
from headrace_gateway.state.store import Owner, StateStore
from headrace_gateway.visit import Visit

_FLUSH_S = 1.0
_MAX_FLUSHED = 500
_MAX_REMEMBERED = 10_000


class Stories:
    """The stories of all projects. Belongs to one event loop.

    Args:
        state: where they are kept.
        ttl_s: for how long.
    """

    def __init__(self, state: StateStore, ttl_s: int) -> None:
        self._state, self._ttl_s = state, ttl_s
        self._recent: OrderedDict[str, tuple[Owner, Json]] = OrderedDict()
        # The newest are written first come, the oldest dropped when too many wait.
        self._waiting: deque[str] = deque(maxlen=10 * _MAX_FLUSHED)

    def add(self, visit: Visit, event: usage_pb2.UsageEvent) -> None:
        """Note a request that is over. Does no I/O."""
        self._recent[visit.request_id] = (Owner.of(visit.principal), story_of(visit, event))
        self._waiting.append(visit.request_id)
        if len(self._recent) > _MAX_REMEMBERED:
            self._recent.popitem(last=False)

    async def keep(self) -> None:
        """Write what waits, each second; run under `supervise`."""
        while True:
            await asyncio.sleep(_FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """Write what waits, up to a bound."""
        ids = [self._waiting.popleft() for _ in range(min(len(self._waiting), _MAX_FLUSHED))]
        expires_s = self._state.now_s() + self._ttl_s
        rows = [
            {
                "request_id": request_id,
                "tenant_id": owner.tenant_id,
                "project_id": owner.project_id,
                "story": orjson.dumps(story),
                "expires_s": expires_s,
            }
            for request_id in ids
            if (found := self._recent.get(request_id)) is not None
            for owner, story in (found,)
        ]
        if rows:
            await self._state.write(lambda it: put(it, table, rows))

    async def find(self, owner: Owner, request_id: str) -> Json | None:
        """Return a request's story to its owner; None = there is none."""
        found = self._recent.get(request_id)
        if found is not None:
            return found[1] if found[0] == owner else None
        return await self._state.read(lambda it: _kept(it, owner, request_id))


def story_of(visit: Visit, event: usage_pb2.UsageEvent) -> Json:
    """Return what is known of a request at its end. Pure."""
    first = visit.jobs[0] if visit.jobs else None
    timings = None if first is None else first.timings
    return {
        **event_story(event),
        "timing": {
            "duration_s": event.duration_s,
            "ttft_s": event.ttft_s or None,
            "queue_s": None if first is None else first.queue_s,
            "stages_s": dict(visit.stages_s),
            "worker": None
            if timings is None
            else {
                "queue_s": timings.queue_s,
                "prefill_s": timings.prefill_s,
                "decode_s": timings.decode_s,
                "preemptions": timings.num_preemptions,
            },
        },
        "labels": visit.request.labels,
        "route": None if visit.choice is None else visit.choice.story(),
        "guard": {
            "input": "passed",
            "output": "blocked" if event.ending == usage_pb2.ENDING_OUTPUT_BLOCKED else "passed",
        },
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
