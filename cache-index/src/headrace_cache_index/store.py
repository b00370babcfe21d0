"""The index in Redis. Each write is one Lua script, so sets, stream and registry always agree."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any, cast

from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import NoScriptError, RedisError

from headrace_cache_index.events import Change, Replacement
from headrace_cache_index.outcome import Outcome, Status
from headrace_common.errors import InvalidRequest, Unavailable
from headrace_common.kv_index import TIERS, IndexKeys, RegistryEntry, ReplicaKey, pad
from headrace_common.lifecycle import raise_if_cancelled
from headrace_contracts.cache_index.v1.cache_index_pb2 import IndexDelta

# Members per SADD of a staged snapshot: some 80 kB a command.
_CHUNK_BLOCKS = 10_000
_STAGING_TTL_S = 60
_REGISTER_TRIES = 5
_Args = list[str | int | bytes]


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Times and sizes of what is written."""

    lease_s: float
    blocks_ttl_s: float
    max_stream_len: int
    # Of all replicas together; each may hold an equal share of it.
    max_total_blocks: int = 1 << 40


@dataclass(frozen=True, slots=True)
class Publisher:
    """Who writes."""

    replica: ReplicaKey
    model: str
    capacity_blocks: int


class Store:
    """Writes and reads the index. Every method raises `Unavailable` when Redis cannot answer.

    Args:
        redis: a client whose answers are bytes.
        keys: the key names.
        limits: times and sizes.
    """

    def __init__(self, redis: Redis, keys: IndexKeys, limits: StoreLimits) -> None:
        self._redis, self._keys = redis, keys
        self._lease_ms = int(limits.lease_s * 1000)
        self._ttl_ms = int(limits.blocks_ttl_s * 1000)
        self._max_len, self._max_total = limits.max_stream_len, limits.max_total_blocks
        prelude = _read("prelude")
        self._register, self._apply, self._replace, self._renew, self._drop = (
            redis.register_script(prelude + _read(name))
            for name in ("register", "apply", "replace", "renew", "drop")
        )

    async def register(self, publisher: Publisher) -> Outcome:
        """Make the publisher's incarnation the live one; an older one is dropped.

        Raises:
            InvalidRequest: the same incarnation registered for another model before.
        """
        replica, model = publisher.replica, publisher.model
        for _ in range(_REGISTER_TRIES):
            entry = (await self.registry()).get(replica.worker_id)
            if entry and entry.incarnation == replica.incarnation and entry.model != model:
                raise InvalidRequest(f"{replica} publishes for {entry.model!r}.", param="model")
            old = ReplicaKey(replica.worker_id, entry.incarnation if entry else 0)
            old_model = entry.model if entry else model
            dropped = IndexDelta(replica=old.to_ref(), model=old_model, dropped=True)
            sets = self._keys.all_blocks(model, replica) + self._keys.all_blocks(old_model, old)
            args: _Args = [model, publisher.capacity_blocks, self._lease_ms, self._max_len]
            args += [pad(old.incarnation) if entry else "", dropped.SerializeToString()]
            answer = await self._run(self._register, sets, replica, args)
            if answer[0] != b"RETRY":
                return _outcome(answer)
        raise Unavailable("The registry changes too fast.", retry_after_s=1.0)

    async def apply(self, publisher: Publisher, changes: Sequence[Change]) -> Outcome:
        """Apply consecutive batches in one round trip.

        Returns:
            The first outcome that is not APPLIED, or the last one.
        """
        replica = publisher.replica
        keys = self._stream_keys() + self._keys.all_blocks(publisher.model, replica)
        rows = [_worker_args(replica) + self._change_args(publisher, change) for change in changes]
        with _translated():
            try:
                answers = await self._apply_each(keys, rows)
            except NoScriptError:
                await self._redis.script_load(self._apply.script)
                answers = await self._apply_each(keys, rows)
        outcomes = [_outcome(answer) for answer in answers]
        return next((o for o in outcomes if o.status is not Status.APPLIED), outcomes[-1])

    async def replace(self, publisher: Publisher, whole: Replacement) -> Outcome:
        """Put a snapshot in the place of all blocks: staged in chunks, switched at once."""
        sets = self._keys.all_blocks(publisher.model, publisher.replica)
        token = secrets.token_hex(4)
        staged = [f"{key}:staged:{token}" for key in sets]
        with _translated():
            for key, tier in zip(staged, TIERS, strict=True):
                for chunk in _chunks(whole.blocks.get(tier, ())):
                    async with self._redis.pipeline(transaction=False) as pipe:
                        pipe.sadd(key, *chunk)
                        pipe.expire(key, _STAGING_TTL_S)
                        await pipe.execute()
        reset = _delta(publisher, whole.seq)
        reset.reset = True
        args: _Args = [whole.seq, self._lease_ms, self._ttl_ms, self._max_len]
        args += [reset.SerializeToString()]
        answer = await self._run(self._replace, sets + staged, publisher.replica, args)
        return _outcome(answer)

    async def renew(self, publisher: Publisher) -> Outcome:
        """Prolong the lease; LOST tells that Redis lost its data."""
        sets = self._keys.all_blocks(publisher.model, publisher.replica)
        args: _Args = [*_worker_args(publisher.replica), self._lease_ms, self._ttl_ms]
        with _translated():
            answer = await self._renew(keys=[self._keys.registry, *sets], args=args)
        return _outcome(answer)

    async def drop_expired(self, replica: ReplicaKey, model: str) -> bool:
        """Drop a replica unless its lease has been renewed; tell whether it was dropped."""
        dropped = IndexDelta(replica=replica.to_ref(), model=model, dropped=True)
        sets = self._keys.all_blocks(model, replica)
        args: _Args = [self._max_len, dropped.SerializeToString()]
        return bool(await self._run(self._drop, sets, replica, args))

    async def registry(self) -> dict[str, RegistryEntry]:
        """Fetch the live incarnation of each worker."""
        with _translated():
            rows = cast("dict[bytes, bytes]", await self._redis.hgetall(self._keys.registry))
        return {worker.decode(): RegistryEntry.decode(text) for worker, text in rows.items()}

    async def limit_blocks(self, publisher: Publisher) -> int:
        """Tell how many blocks a replica may hold: its own capacity or its share of the whole."""
        with _translated():
            num_replicas = await self._redis.hlen(self._keys.registry)
        return min(publisher.capacity_blocks, self._max_total // max(1, num_replicas))

    async def num_blocks(self, model: str, replica: ReplicaKey) -> int:
        """Count the blocks of one replica over all tiers."""
        with _translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for key in self._keys.all_blocks(model, replica):
                    pipe.scard(key)
                return sum(await pipe.execute())

    async def membership(
        self, model: str, replica: ReplicaKey, chain: Sequence[bytes]
    ) -> list[list[bool]]:
        """Tell for each tier, in the order of `TIERS`, which blocks of *chain* it holds."""
        if not chain:
            return [[] for _ in TIERS]
        with _translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for key in self._keys.all_blocks(model, replica):
                    pipe.smismember(key, list(chain))
                return [[bool(held) for held in row] for row in await pipe.execute()]

    async def ping(self) -> None:
        """Check that Redis answers."""
        with _translated():
            await self._redis.ping()

    async def _apply_each(self, keys: list[str], rows: list[_Args]) -> list[Any]:
        # By its hash: a script object would first ask Redis whether it knows it, a round trip more.
        async with self._redis.pipeline(transaction=False) as pipe:
            for args in rows:
                pipe.evalsha(self._apply.sha, len(keys), *keys, *args)
            return await pipe.execute()

    def _stream_keys(self) -> list[str]:
        return [self._keys.registry, self._keys.deltas]

    def _change_args(self, publisher: Publisher, change: Change) -> _Args:
        overflow = _delta(publisher, change.seq)
        overflow.cleared = True
        args: _Args = [change.seq, self._lease_ms, self._ttl_ms, self._max_len, self._max_total]
        args += ["1" if change.cleared else "0", overflow.SerializeToString()]
        for tier in TIERS:
            args += [_pack(change.added.get(tier)), _pack(change.removed.get(tier))]
        return args + [delta.SerializeToString() for delta in _deltas(publisher, change)]

    async def _run(
        self, script: AsyncScript, sets: list[str], replica: ReplicaKey, args: _Args
    ) -> Any:  # Any: what the script answers
        with _translated():
            return await script(keys=self._stream_keys() + sets, args=_worker_args(replica) + args)


def _read(name: str) -> str:
    return (resources.files("headrace_cache_index") / "lua" / f"{name}.lua").read_text()


def _worker_args(replica: ReplicaKey) -> _Args:
    return [replica.worker_id, pad(replica.incarnation)]


def _outcome(answer: list[Any]) -> Outcome:  # Any: bytes and int by turns
    return Outcome(Status(answer[0].decode()), int(answer[1]))


def _pack(hashes: set[bytes] | None) -> bytes:
    return b"".join(hashes or ())


def _delta(publisher: Publisher, seq: int) -> IndexDelta:
    return IndexDelta(replica=publisher.replica.to_ref(), seq=seq, model=publisher.model)


def _deltas(publisher: Publisher, change: Change) -> list[IndexDelta]:
    # At least one per batch, so that mirrors see every number.
    deltas = []
    for tier in change.tiers() or TIERS[:1]:
        delta = _delta(publisher, change.seq)
        delta.tier = tier
        delta.added = _pack(change.added.get(tier))
        delta.removed = _pack(change.removed.get(tier))
        deltas.append(delta)
    deltas[0].cleared = change.cleared
    return deltas


def _chunks(blocks: Iterable[bytes]) -> Iterator[list[bytes]]:
    everything = list(blocks)
    for start in range(0, len(everything), _CHUNK_BLOCKS):
        yield everything[start : start + _CHUNK_BLOCKS]


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
        raise_if_cancelled()
    except (RedisError, OSError, TimeoutError) as error:
        raise_if_cancelled()
        raise Unavailable("The index's store cannot be reached.", retry_after_s=1.0) from error
