"""API key -> Principal: only its SHA-256 leaves this module, and only towards billing.

A cached answer is used for a minute, dropped within a second of a change (`watch`), and served
stale for at most five minutes while billing does not answer; where nothing is cached, a billing
that starts again is asked for two seconds more. Unknown keys are remembered for seconds, so that a
client that repeats a wrong key does not become billing's load.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from headrace_common.awake import awake_timeout
from headrace_common.clock import Clock
from headrace_common.errors import (
    HeadraceError,
    KeyRevoked,
    ModelNotAllowed,
    ScopeMissing,
    Unavailable,
    UnknownKey,
)
from headrace_contracts.billing.v1 import billing_pb2
from headrace_gateway.metrics import GatewayMetrics
from headrace_gateway.principal import Principal
from headrace_gateway.request_headers import SEVERAL, headers_by_name

# What names a key: the SHA-256 of a secret, which opens the door while the secret holds; or its id,
# for work that goes on after its request.
KeyRef: TypeAlias = bytes | str

_FRESH_S = 60.0
_STALE_S = 300.0
_REFUSED_S = 5.0
_MAX_CACHED = 100_000
_MAX_REFUSED = 10_000
# Billing beats every second; after three without one, nothing cached is trusted unasked.
_WATCH_SILENCE_S = 3.0
_MAX_KEY_BYTES = 512
_RETURN_S, _ASK_AGAIN_S = 2.0, 0.1


class KeySource(Protocol):
    """What billing offers here."""

    @property
    def is_away(self) -> bool:
        """Whether nobody listened there at the last try."""
        ...

    async def resolve_key(self, key: KeyRef) -> billing_pb2.Principal:
        """Return the owner of a key."""
        ...

    def watch_changes(self) -> AsyncIterator[billing_pb2.Change]:
        """Yield changes and beats."""
        ...


@dataclass(slots=True)
class _Entry:
    principal: Principal
    checked_s: float
    is_suspect: bool = False


class KeyAuth:
    """Checks keys. Belongs to one event loop.

    Args:
        source: billing.
        clock: time.
        metrics: where lookups are counted.
        on_change: also hears of every change; None = some may have been missed.
    """

    def __init__(
        self,
        source: KeySource,
        clock: Clock,
        metrics: GatewayMetrics,
        on_change: Callable[[billing_pb2.Change | None], None] = lambda _: None,
    ) -> None:
        self._source, self._clock, self._metrics = source, clock, metrics
        self._on_change = on_change
        self._from_cache = metrics.key_lookups.labels("cache")
        self._entries: OrderedDict[KeyRef, _Entry] = OrderedDict()
        # Until when, and what is told.
        self._refused: OrderedDict[KeyRef, tuple[float, str]] = OrderedDict()
        self._lookups: dict[KeyRef, asyncio.Task[Principal]] = {}
        self.is_watching = False

    async def authenticate(self, headers: Iterable[tuple[bytes, bytes]]) -> Principal:
        """Return who calls.

        Args:
            headers: raw request headers; `Authorization: Bearer`, or else `x-api-key`, counts.

        Raises:
            UnknownKey: no key, a malformed, unknown, revoked or expired one.
            Unavailable: billing does not answer and nothing usable is cached.
        """
        return await self.resolve(key_digest(headers_by_name(headers)))

    async def resolve(self, key: KeyRef) -> Principal:
        """Return whose key this is; raises as `authenticate` does."""
        now_s = self._clock.now_s()
        entry = self._entries.get(key)
        if entry is not None and not entry.is_suspect and now_s - entry.checked_s < _FRESH_S:
            self._from_cache.inc()
            principal = entry.principal
        else:
            principal = await self._ask_again(key, now_s)
        if 0 < principal.expires_unix_s <= self._clock.unix_s():
            raise KeyRevoked("This API key has expired.")
        return principal

    async def watch(self) -> None:
        """Follow changes until the stream ends or falls silent; run under `supervise`."""
        try:
            changes = self._source.watch_changes()
            while True:
                async with awake_timeout(_WATCH_SILENCE_S):
                    change = await anext(changes, None)
                if change is None:
                    return
                self._apply(change)
                self._on_change(change)
                if not self.is_watching:
                    # What changed while nobody listened is not known.
                    self._suspect_all()
                    self._on_change(None)
                    self.is_watching = True
        finally:
            self.is_watching = False
            self._suspect_all()

    def _apply(self, change: billing_pb2.Change) -> None:
        if not (change.all_keys or change.key_ids):
            return
        self._refused.clear()
        changed = set(change.key_ids)
        for key, entry in list(self._entries.items()):
            if change.all_keys or entry.principal.key_id in changed:
                del self._entries[key]
        # A lookup under way may have read the state before the change.
        self._lookups.clear()

    def _suspect_all(self) -> None:
        for entry in self._entries.values():
            entry.is_suspect = True

    async def _ask_again(self, key: KeyRef, now: float) -> Principal:
        until_s, told = self._refused.get(key, (0.0, ""))
        if until_s > now:
            self._metrics.key_lookups.labels("refused_cache").inc()
            raise UnknownKey(told)
        while True:
            try:
                return await self._look_up(key)
            except UnknownKey as error:
                raise self._refuse(key, now, error) from None
            except HeadraceError as error:
                known = self._stale(key, now)
                if known is not None:
                    return known
                if not self._source.is_away or self._clock.now_s() >= now + _RETURN_S:
                    told = "The key cannot be checked now."
                    raise Unavailable(told, retry_after_s=1.0) from error
            await asyncio.sleep(_ASK_AGAIN_S)

    def _refuse(self, key: KeyRef, now: float, error: UnknownKey) -> UnknownKey:
        self._entries.pop(key, None)
        # Whoever has a key may know what became of it: revoked, its account suspended.
        told = error.public_message if isinstance(error, KeyRevoked) else "Incorrect API key."
        self._refused[key] = now + _REFUSED_S, told
        while len(self._refused) > _MAX_REFUSED:
            self._refused.popitem(last=False)
        return UnknownKey(told)

    def _stale(self, key: KeyRef, now: float) -> Principal | None:
        entry = self._entries.get(key)
        if entry is None or now - entry.checked_s > _STALE_S:
            return None
        self._metrics.key_lookups.labels("stale").inc()
        self._metrics.degraded.labels("billing").inc()
        return entry.principal

    async def _look_up(self, key: KeyRef) -> Principal:
        """Ask billing once, however many requests wait."""
        task = self._lookups.get(key)
        if task is None:
            task = self._lookups[key] = asyncio.create_task(self._ask(key))
        return await asyncio.shield(task)

    async def _ask(self, key: KeyRef) -> Principal:
        task = asyncio.current_task()
        try:
            self._metrics.key_lookups.labels("billing").inc()
            principal = Principal.of(await self._source.resolve_key(key))
            # Not kept when a change came meanwhile: the answer may be older than it.
            if self._lookups.get(key) is task:
                self._keep(key, principal)
            return principal
        finally:
            if self._lookups.get(key) is task:
                del self._lookups[key]

    def _keep(self, key: KeyRef, principal: Principal) -> None:
        self._entries[key] = _Entry(principal, self._clock.now_s(), not self.is_watching)
        self._entries.move_to_end(key)
        while len(self._entries) > _MAX_CACHED:
            self._entries.popitem(last=False)


def key_digest(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the SHA-256 of the key in a request's headers.

    Raises:
        UnknownKey: there is none, or it is malformed.
    """
    return hashlib.sha256(_bearer(headers)).digest()


def check_model_allowed(principal: Principal, model: str) -> None:
    """Raise unless the key may use *model*.

    Raises:
        ModelNotAllowed: it may not.
    """
    if principal.allowed_models and model not in principal.allowed_models:
        raise ModelNotAllowed(f"This API key may not use the model {model!r}.", param="model")


def check_scope(principal: Principal, scope: str) -> None:
    """Raise unless the key is for *scope*; a key without scopes is for inference and usage.

    Raises:
        ScopeMissing: it is not.
    """
    if principal.scopes and scope not in principal.scopes:
        raise ScopeMissing(f"This API key lacks the scope {scope!r}.")


def _bearer(headers: Mapping[bytes, bytes]) -> bytes:
    found, given = headers.get(b"x-api-key", b""), headers.get(b"authorization")
    if SEVERAL in (found, given):
        # A proxy in front may have checked the other one.
        raise UnknownKey("More than one API key. Send one header, once.")
    if given is not None:
        scheme, _, found = given.partition(b" ")
        if scheme.lower() != b"bearer":
            found = b""
    key = found.strip()
    if not 0 < len(key) <= _MAX_KEY_BYTES:
        raise UnknownKey("No API key. Send it as `Authorization: Bearer <key>`.")
    return key
