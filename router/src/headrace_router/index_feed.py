"""Feeds the mirror from Redis: reads the sets once, then follows the stream of changes.

Order makes it right without locks: note the stream's end, read the sets, then apply every change
from the noted place on. A block's state is set by the last change that touches it, and changes
before the noted place are in the sets, so applying some of them twice does no harm. A gap, a reset
or a silent difference leads to a new reading of that replica's sets alone.

While Redis is away the mirror goes on serving what it has. Decisions go on while the index is read:
everything is done in slices of a millisecond or two.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final, cast

from google.protobuf.message import DecodeError
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from headrace_common.clock import Clock
from headrace_common.kv_index import (
    DELTA_FIELD,
    SHORT_HASH_BYTES,
    TIERS,
    IndexKeys,
    RegistryEntry,
    ReplicaKey,
    short_ints,
)
from headrace_common.lifecycle import cancel_and_wait, raise_if_cancelled
from headrace_contracts.cache_index.v1.cache_index_pb2 import IndexDelta
from headrace_router.metrics import RouterMetrics
from headrace_router.mirror import BYTES_PER_ENTRY, Mirrored, PrefixMirror

_log = logging.getLogger(__name__)
_BLOCK_MS = 200
_READ_COUNT = 500
_SCAN_COUNT = 4_000
# Blocks handled before other tasks get a turn.
_BLOCKS_PER_TURN = 2_000
# Replicas read at a time, so that Redis works on one while another is taken in.
_READERS = 3
_START: Final = (0, 0)
StreamId = tuple[int, int]


class IndexFeed:
    """Keeps a mirror in step with Redis.

    Args:
        redis: a client whose answers are bytes and whose timeout is above 200 ms.
        keys: key names.
        mirror: what is fed.
        clock: time.
        metrics: what is counted.
        audit_interval_s: time between two comparisons of sizes and numbers.
    """

    def __init__(
        self,
        redis: Redis,
        keys: IndexKeys,
        mirror: PrefixMirror,
        clock: Clock,
        metrics: RouterMetrics,
        audit_interval_s: float,
    ) -> None:
        self._redis, self._keys, self._mirror = redis, keys, mirror
        self._clock, self._metrics = clock, metrics
        self._audit_interval_s = audit_interval_s
        self._position: StreamId | None = None
        self._started_at_s = self._heard_at_s = clock.now_s()
        self._since_turn = 0
        self._is_warm = False

    @property
    def is_warm(self) -> bool:
        """Whether the index was read whole, and has not been lost since."""
        return self._is_warm

    def staleness_s(self) -> float:
        """Time since Redis was last heard of."""
        return self._clock.now_s() - self._heard_at_s

    async def follow(self) -> None:
        """Follow the index until something fails; call again to go on where it stopped.

        Raises:
            redis.exceptions.RedisError: Redis cannot be read.
        """
        if self._position is None:
            await self._read_everything()
        # Compared at once, since much may have happened since the last call.
        audited_at_s = float("-inf")
        while True:
            is_caught_up = await self._read_changes()
            now_s = self._heard_at_s = self._clock.now_s()
            if is_caught_up and now_s - audited_at_s >= self._audit_interval_s:
                await self._audit()
                audited_at_s = now_s
            self._show_size()

    async def sweep(self) -> None:
        """Clear stale bits in slices, for ever."""
        while True:
            has_more = self._mirror.sweep_some(2 * _BLOCKS_PER_TURN)
            self._metrics.index_staleness_s.set(self.staleness_s())
            await asyncio.sleep(0.01 if has_more else 0.5)

    async def _read_everything(self) -> None:
        position = await self._stream_end()
        registry = await self._registry()
        for key in set(self._mirror.replicas()) - set(registry):
            self._mirror.drop(key)
        todo = iter(registry.items())
        readers = [asyncio.create_task(self._rescan_each(todo)) for _ in range(_READERS)]
        try:
            for reader in readers:
                await reader
        finally:
            await cancel_and_wait(*readers)
        self._position = position
        self._set_warm(True)
        took_s = self._clock.now_s() - self._started_at_s
        self._metrics.index_warm_up_s.set(took_s)
        _log.info("the mirror holds %d hashes after %.2f s", self._mirror.num_entries(), took_s)

    async def _rescan_each(self, todo: Iterator[tuple[ReplicaKey, RegistryEntry]]) -> None:
        for key, entry in todo:
            await self._rescan(key, entry, "start")
            self._show_size()

    async def _read_changes(self, block_ms: int | None = _BLOCK_MS) -> bool:
        """Read and apply what is new, waiting a little; tell whether that was all."""
        milliseconds, number = self._position or _START
        since = f"{milliseconds}-{number}"
        answer = await self._redis.xread(
            {self._keys.deltas: since}, count=_READ_COUNT, block=block_ms
        )
        raise_if_cancelled()
        rows = _rows(answer)
        for stream_id, fields in rows:
            await self._take(fields.get(DELTA_FIELD, b""))
            self._position = _parse(stream_id)
        return len(rows) < _READ_COUNT

    async def _take(self, encoded: bytes) -> None:
        """Apply one change. One that cannot be read is passed over: a gap tells of it later."""
        try:
            delta = IndexDelta.FromString(encoded)
        except DecodeError as error:
            self._pass_over(error)
            return
        try:
            reason = "" if self._mirror.apply(delta) else "reset" if delta.reset else "gap"
        except (ValueError, LookupError) as error:
            self._pass_over(error)
            reason = "malformed"
        if reason:
            await self._rescan_by_key(ReplicaKey.of(delta.replica), reason)
        await self._take_turns(len(delta.added) + len(delta.removed))

    def _pass_over(self, error: Exception) -> None:
        _log.warning("a change of the index cannot be read: %s", error)
        self._metrics.index_failures.inc()

    async def _audit(self) -> None:
        """Find what the stream did not tell: data lost in Redis, trimmed changes, drift."""
        mirrored = dict(self._mirror.replicas())
        end, registry, sizes = await self._read_totals(mirrored)
        if self._position is None or end > self._position:
            # Not caught up after all: the next audit will tell.
            return
        if end < self._position:
            _log.warning("Redis lost its data; the mirror starts over")
            self._position = end
            self._set_warm(False)
        for key, known in mirrored.items():
            entry = registry.get(key)
            has_drifted = not known.is_partial and sizes[key] != known.num_blocks
            if entry is None:
                self._mirror.drop(key)
            elif has_drifted or entry.seq != known.seq:
                await self._rescan(key, entry, "drift")
        for key in registry.keys() - mirrored.keys():
            await self._rescan(key, registry[key], "unknown")
        if registry:
            self._set_warm(True)

    async def _read_totals(
        self, mirrored: Mapping[ReplicaKey, Mirrored]
    ) -> tuple[StreamId, dict[ReplicaKey, RegistryEntry], dict[ReplicaKey, int]]:
        """Read, as of one moment, the stream's end, the registry and each replica's blocks."""
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.xrevrange(self._keys.deltas, count=1)
            pipe.hgetall(self._keys.registry)
            for key, known in mirrored.items():
                for name in self._keys.all_blocks(known.model, key):
                    pipe.scard(name)
            newest, rows, *counts = await pipe.execute()
        by_tier = iter(counts)
        sizes = {key: sum(islice(by_tier, len(TIERS))) for key in mirrored}
        return _parse(newest[0][0]) if newest else _START, _parse_registry(rows), sizes

    async def _rescan_by_key(self, key: ReplicaKey, reason: str) -> None:
        entry = (await self._registry()).get(key)
        if entry is None:
            self._mirror.drop(key)
        else:
            await self._rescan(key, entry, reason)

    async def _rescan(self, key: ReplicaKey, entry: RegistryEntry, reason: str) -> None:
        """Read a replica's sets into a fresh slot, then switch to it."""
        self._metrics.index_rescans.labels(reason).inc()
        fresh = self._mirror.begin(entry.model, entry.seq)
        try:
            for tier in TIERS:
                name, cursor = self._keys.blocks(entry.model, key, tier), 0
                while True:
                    cursor, members = await self._redis.sscan(name, cursor, count=_SCAN_COUNT)
                    raise_if_cancelled()
                    hashes = self._hashes(cast("list[bytes]", members))
                    for start in range(0, len(hashes), _BLOCKS_PER_TURN):
                        part = hashes[start : start + _BLOCKS_PER_TURN]
                        self._mirror.add(fresh, tier, part)
                        await asyncio.sleep(0)
                    if not cursor:
                        break
        except BaseException:
            self._mirror.abandon(fresh)
            raise
        self._mirror.commit(key, fresh)

    def _hashes(self, members: list[bytes]) -> tuple[int, ...]:
        """Return the hashes in a set; what is none, somebody else put there."""
        joined = b"".join(members)
        if len(joined) != SHORT_HASH_BYTES * len(members):
            self._metrics.index_failures.inc()
            joined = b"".join(one for one in members if len(one) == SHORT_HASH_BYTES)
        return short_ints(joined)

    async def _stream_end(self) -> StreamId:
        try:
            info = await self._redis.xinfo_stream(self._keys.deltas)
        except ResponseError:
            # No such stream yet.
            return _START
        return _parse(info["last-generated-id"])

    async def _registry(self) -> dict[ReplicaKey, RegistryEntry]:
        return _parse_registry(await self._redis.hgetall(self._keys.registry))

    def _set_warm(self, is_warm: bool) -> None:
        self._is_warm = is_warm
        self._metrics.index_warm.set(is_warm)

    def _show_size(self) -> None:
        num_entries = self._mirror.num_entries()
        self._metrics.index_entries.set(num_entries)
        self._metrics.index_bytes.set(num_entries * BYTES_PER_ENTRY)
        self._metrics.index_evicted.set(self._mirror.num_evicted)

    async def _take_turns(self, num_bytes: int) -> None:
        self._since_turn += 1 + num_bytes // 8
        if self._since_turn >= _BLOCKS_PER_TURN:
            self._since_turn = 0
            await asyncio.sleep(0)


def _parse_registry(rows: Any) -> dict[ReplicaKey, RegistryEntry]:  # Any: redis-py's answer
    found = {}
    for worker, text in rows.items():
        try:
            entry = RegistryEntry.decode(text)
            found[ReplicaKey(worker.decode(), entry.incarnation)] = entry
        except ValueError as error:
            _log.warning("an entry of the registry cannot be read: %s", error)
    return found


def _rows(answer: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:  # Any: redis-py's answer
    if not answer:
        return []
    if isinstance(answer, dict):
        # RESP3: stream name -> [rows]
        answer = [(name, rows[0]) for name, rows in answer.items()]
    return cast("list[tuple[bytes, dict[bytes, bytes]]]", answer[0][1])


def _parse(stream_id: bytes) -> StreamId:
    milliseconds, _, number = stream_id.decode().partition("-")
    return int(milliseconds), int(number)
