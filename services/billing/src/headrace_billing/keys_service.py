"""What gateways ask: whom a key stands for, what changes, what things cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial

from sqlalchemy import Connection

from headrace_billing.changes import ChangeFeed
from headrace_billing.key_rules import HASH_BYTES, check_usable, hash_api_key, principal
from headrace_billing.key_store import KnownKey, find_by_hash, find_by_id, write_last_used
from headrace_billing.price_store import load_price_book
from headrace_billing.store import Database
from headrace_common.clock import Clock
from headrace_common.errors import InvalidRequest, UnknownKey
from headrace_common.rpc import Call
from headrace_contracts.billing.v1 import billing_pb2 as pb

# The contract promises last_used within a minute.
_LAST_USED_INTERVAL_S = 15.0


class LastUsed:
    """Remembers when keys were used and writes it down now and then, not on each request."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._used_unix_s: dict[str, int] = {}

    def note(self, key_id: str, now_unix_s: float) -> None:
        """Remember a use."""
        self._used_unix_s[key_id] = int(now_unix_s)

    async def flush(self) -> None:
        """Write down what is remembered.

        Raises:
            Unavailable: the database cannot do it now; it stays remembered.
        """
        taken, self._used_unix_s = self._used_unix_s, {}
        try:
            if taken:
                await self._database.write(lambda it: write_last_used(it, taken))
        except BaseException:
            self._used_unix_s = {**taken, **self._used_unix_s}
            raise

    async def run(self) -> None:
        """Flush for ever."""
        while True:
            await asyncio.sleep(_LAST_USED_INTERVAL_S)
            await self.flush()


class KeysService:
    """Servicer of `headrace.billing.v1.Keys`."""

    def __init__(
        self, database: Database, feed: ChangeFeed, last_used: LastUsed, clock: Clock
    ) -> None:
        self._database = database
        self._feed = feed
        self._last_used = last_used
        self._clock = clock

    async def ResolveKey(self, request: pb.ResolveKeyRequest, _call: Call) -> pb.Principal:  # noqa: N802 - contract name
        """Say whom a key stands for.

        Raises:
            UnknownKey: nobody.
            KeyRevoked: it was revoked or has expired.
        """
        if request.key_id:
            return await self._resolve(partial(find_by_id, key_id=request.key_id))
        if len(request.key_sha256) != HASH_BYTES:
            raise InvalidRequest("key_sha256 must have 32 bytes.", param="key_sha256")
        return await self._resolve_hash(request.key_sha256)

    async def resolve_secret(self, api_key: str) -> pb.Principal:
        """Say whom a key stands for that was shown to this service itself.

        Raises:
            UnknownKey: nobody.
        """
        return await self._resolve_hash(hash_api_key(api_key))

    async def _resolve_hash(self, digest: bytes) -> pb.Principal:
        now_unix_s = self._clock.unix_s()
        return await self._resolve(partial(find_by_hash, key_sha256=digest, now_unix_s=now_unix_s))

    async def _resolve(self, find: Callable[[Connection], KnownKey | None]) -> pb.Principal:
        now_unix_s = self._clock.unix_s()
        known = await self._database.read(find)
        if known is None:
            raise UnknownKey("This API key is not known.")
        check_usable(known.key, known.owner, now_unix_s)
        self._last_used.note(known.key.key_id, now_unix_s)
        return principal(known.key, known.owner, known.revision)

    async def WatchChanges(  # noqa: N802 - contract name
        self, _request: pb.WatchChangesRequest, _call: Call
    ) -> AsyncIterator[pb.Change]:
        """A beat at once, changes when they are made, beats in between.

        Raises:
            Unavailable: changes cannot be seen; whoever watches must take its cache for stale.
        """
        with self._feed.watch() as watcher:
            while True:
                yield await watcher.next()

    async def GetPriceTable(self, _request: pb.GetPriceTableRequest, _call: Call) -> pb.PriceTable:  # noqa: N802 - contract name
        """All prices, past and coming."""
        return (await self._database.read(load_price_book)).to_proto()
