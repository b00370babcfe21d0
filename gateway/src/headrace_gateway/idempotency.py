"""`Idempotency-Key`: the same POST sent again gets the same answer, and is billed once.

- The key belongs to the API key and the path. Another body under it is a conflict (409).
- A request with a key is finished even when its client leaves, so that the repetition finds the
  answer. A repetition that comes meanwhile waits, up to a bound, then gets 409 with Retry-After.
- Streams are kept whole and replayed.
- A refusal, or a failure in the middle, is not kept: the repetition is tried anew.
- When the process dies in between, the repetition runs under the first request's id, once nobody
  has renewed its lease for some seconds: the ledger books an id once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable

from headrace_common.errors import ClientGone, HeadraceError, InvalidRequest
from headrace_common.lifecycle import cancel_and_wait
from headrace_gateway.call_rate import CallRate
from headrace_gateway.captured_exchange import CapturedExchange
from headrace_gateway.error_body import IdempotencyConflict, RequestInProgress
from headrace_gateway.http_exchange import HttpExchange
from headrace_gateway.request_headers import SEVERAL
from headrace_gateway.state.idempotency_records import (
    LEASE_S,
    Claim,
    ClaimKind,
    IdempotencyRecords,
    StoredAnswer,
)
from headrace_gateway.visit import Caller, EndFailed, WatchedExchange

_log = logging.getLogger(__name__)

IDEMPOTENCY_KEY = b"idempotency-key"
_MAX_KEY_BYTES = 255
# An answer larger than this is not kept.
_MAX_ANSWER_BYTES = 8 * 2**20
_POLL_S = 0.25

# Answers a request; returns the outcome's name.
Work = Callable[[Caller, WatchedExchange, bytes], Awaitable[str]]


class Idempotency:
    """Runs requests that carry a key. Belongs to one event loop.

    Args:
        records: shared by all processes.
        wait_s: how long a repetition waits for the first to end.
        rate: bounds how often a tenant is given kept answers, which no limit of its keys counts.
    """

    def __init__(self, records: IdempotencyRecords, wait_s: float, rate: CallRate) -> None:
        self._records, self._wait_s, self._rate = records, wait_s, rate
        self._running: set[asyncio.Task[str]] = set()

    async def run(self, caller: Caller, exchange: HttpExchange, body: bytes, work: Work) -> str:
        """Answer by *work*, or by what an earlier request with the same key got.

        Raises:
            IdempotencyConflict: the key was used with another body.
            RequestInProgress: the first request still runs.
            RateLimited: kept answers are asked for too often.
            HeadraceError: what *work* raises.
        """
        record_id = _record_id(caller, exchange)
        claim = await self._claim(record_id, body, caller)
        if claim.answer is not None:
            self._rate.count(caller.principal.tenant_id)
            await _replay(exchange, claim.answer)
            return "replayed"
        if claim.request_id != caller.request_id:
            _rename(exchange, caller.request_id, claim.request_id)
        exchange_both = _TeeExchange(exchange, self._records, record_id, caller.request_id)
        owned = Caller(claim.request_id, caller.principal, exchange_both)
        task = asyncio.create_task(self._work(owned, exchange_both, body, work))
        self._running.add(task)
        task.add_done_callback(self._forget)
        gone = asyncio.Event()
        exchange.on_gone(gone.set)
        watching = asyncio.create_task(gone.wait())
        try:
            await asyncio.wait({task, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and exchange.client_is_gone:
                raise ClientGone("The client left; its request goes on.")
            return await asyncio.shield(task)
        finally:
            exchange.on_gone(None)
            await cancel_and_wait(watching)

    async def close(self, grace_s: float) -> None:
        """Let what runs finish, then end it."""
        if self._running:
            await asyncio.wait(self._running, timeout=grace_s)
        await cancel_and_wait(*self._running)

    async def _claim(self, record_id: bytes, body: bytes, caller: Caller) -> Claim:
        digest = hashlib.sha256(body).digest()
        waited_s = 0.0
        while True:
            claim = await self._records.claim(
                record_id, digest, caller.request_id, caller.principal.tenant_id
            )
            if claim.kind is ClaimKind.OTHER_BODY:
                raise IdempotencyConflict(
                    "This Idempotency-Key was used with another request body.",
                    param="Idempotency-Key",
                )
            if claim.kind is not ClaimKind.RUNNING:
                return claim
            if waited_s >= self._wait_s:
                raise RequestInProgress(
                    "The request with this Idempotency-Key still runs.", retry_after_s=1.0
                )
            await asyncio.sleep(_POLL_S)
            waited_s += _POLL_S

    async def _work(self, caller: Caller, exchange: _TeeExchange, body: bytes, work: Work) -> str:
        renewing = asyncio.create_task(self._renew(exchange))
        try:
            return await work(caller, exchange, body)
        finally:
            await cancel_and_wait(renewing)
            if not exchange.is_kept:
                await asyncio.shield(self._release(exchange))

    async def _renew(self, exchange: _TeeExchange) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 4)
            try:
                await self._records.renew(exchange.record_id, exchange.owner)
            except HeadraceError as error:
                _log.warning("an idempotency record's lease: %s", error)

    async def _release(self, exchange: _TeeExchange) -> None:
        try:
            await self._records.release(exchange.record_id, exchange.owner)
        except HeadraceError as error:
            _log.warning("an idempotency record stays claimed until its lease ends: %s", error)

    def _forget(self, task: asyncio.Task[str]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Told to the client if it is still there.
            _log.debug("a request with an idempotency key: %r", error)


class _TeeExchange(CapturedExchange):
    """Keeps an answer, and sends it on as long as the client is there."""

    def __init__(
        self, live: HttpExchange, records: IdempotencyRecords, record_id: bytes, owner: str
    ) -> None:
        super().__init__(live.request_headers)
        self._live, self._records = live, records
        self.record_id, self.owner = record_id, owner
        self.headers, self.client_id = live.headers, live.client_id
        self.is_kept = False

    @property
    def end_failed(self) -> EndFailed | None:
        """The end of a failed stream is the client's alone: it is not kept."""
        return self._live.end_failed

    @end_failed.setter
    def end_failed(self, end: EndFailed | None) -> None:
        self._live.end_failed = end

    def on_gone(self, callback: Callable[[], None] | None) -> None:
        """Never called: the request is finished whatever its client does."""

    async def send_json(
        self, status: int, body: bytes, extra: list[tuple[bytes, bytes]] | None = None
    ) -> None:
        await super().send_json(status, body, extra)
        await self._keep()
        await self._on(self._live.send_json(status, body))

    async def begin_stream(self) -> None:
        await super().begin_stream()
        await self._on(self._live.begin_stream())

    async def send_events(self, events: bytes, *, is_last: bool = False) -> None:
        await super().send_events(events, is_last=is_last)
        self._live.num_events = self.num_events
        if is_last:
            await self._keep()
        await self._on(self._live.send_events(events, is_last=is_last))

    async def _on(self, sending: Awaitable[None]) -> None:
        try:
            await sending
        except ClientGone:
            return

    async def _keep(self) -> None:
        """Keep the answer before its last byte goes out."""
        body = self.body
        if len(body) > _MAX_ANSWER_BYTES:
            return
        try:
            answer = StoredAnswer(self.status, list(self.headers), body)
            self.is_kept = await self._records.keep(self.record_id, self.owner, answer)
        except HeadraceError as error:
            _log.warning("an idempotent answer cannot be kept: %s", error)


def _record_id(caller: Caller, exchange: HttpExchange) -> bytes:
    key = exchange.request_headers.get(IDEMPOTENCY_KEY, b"")
    # Of several, a proxy in between may go by another one.
    if key == SEVERAL or not 0 < len(key) <= _MAX_KEY_BYTES:
        raise InvalidRequest(
            f"One Idempotency-Key of 1 to {_MAX_KEY_BYTES} characters may be sent.",
            param="Idempotency-Key",
        )
    principal = caller.principal
    parts = (principal.tenant_id.encode(), principal.key_id.encode(), exchange.path.encode(), key)
    return hashlib.sha256(b"\x00".join(parts)).digest()


def _rename(exchange: HttpExchange, old: str, new: str) -> None:
    exchange.headers[:] = [
        (name, new.encode() if value == old.encode() else value) for name, value in exchange.headers
    ]


async def _replay(exchange: HttpExchange, answer: StoredAnswer) -> None:
    exchange.headers[:] = [*answer.headers, (b"idempotent-replayed", b"true")]
    if answer.body.startswith((b"data:", b"event:", b":")):
        await exchange.begin_stream()
        await exchange.send_events(answer.body, is_last=True)
    else:
        await exchange.send_json(answer.status, answer.body)
