"""Which consumer reads which partitions, and the fence that keeps a stale one from booking.

::

    free --claim, epoch + 1--> mine --renew--> mine --release--> free
                                 '--(no renewal for the lease)--> anybody's to claim

Members divide the partitions evenly: who has too many lets go, who has too few claims what is free
or expired. Clocks only decide when a partition may change hands. That nothing is booked twice or
out of turn rests on the epoch alone: every batch is booked in a transaction that holds the rows of
its partitions and finds its own epoch there. A consumer that slept through its lease finds another
one, and its batch is rolled back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sqlalchemy import ColumnElement, Connection, delete, select, update

from headrace_billing import schema
from headrace_billing.store import Database
from headrace_common.clock import Clock, unix_us
from headrace_common.database import insert_new, put

LEASE_S = 10.0
# In place of an end: the log has no such partition any more.
_GONE = -1
# Topic and partition.
Partition: TypeAlias = tuple[str, int]
_leases, _consumers = schema.partition_leases, schema.consumers


class StaleShareError(Exception):
    """A partition belongs to somebody else by now; nothing of the batch is booked."""


@dataclass(frozen=True)
class _Lease:
    partition: Partition
    consumer_id: str
    epoch: int
    expires_unix_us: int


class Shares:
    """This consumer's part of the partitions.

    Args:
        database: where the books are.
        consumer_id: stays the same when the process starts anew, so that it goes on at once.
        clock: time.
        lease_s: for so long a consumer that says nothing keeps its partitions.
    """

    def __init__(
        self, database: Database, consumer_id: str, clock: Clock, lease_s: float = LEASE_S
    ) -> None:
        self._database = database
        self._consumer_id = consumer_id
        self._clock = clock
        self._lease_us = round(lease_s * 1e6)
        self.epochs: Mapping[Partition, int] = {}

    async def take(self, partitions: Sequence[Partition]) -> Mapping[Partition, int]:
        """Begin a life: what an earlier one of this consumer had gets a new epoch.

        Returns:
            The epoch by partition of the share.
        """
        self.epochs = await self._database.write(
            lambda it: self._settle(it, partitions, caught_up_for_s=0, is_new=True)
        )
        return self.epochs

    async def renew(
        self, partitions: Sequence[Partition], caught_up_for_s: float
    ) -> Mapping[Partition, int]:
        """Stay alive, and claim or let go so that all members have the same."""
        self.epochs = await self._database.write(
            lambda it: self._settle(it, partitions, caught_up_for_s=caught_up_for_s)
        )
        return self.epochs

    async def release(self) -> None:
        """Let everything go: somebody else need not wait for the lease to end."""
        self.epochs = {}
        await self._database.write(self._release)

    def check(self, connection: Connection, partitions: Iterable[Partition]) -> None:
        """Hold the rows of these partitions until the transaction ends.

        Raises:
            StaleShareError: one belongs to somebody else.
        """
        wanted = set(partitions)
        now = {
            it.partition: it.epoch
            for it in _read(connection, {topic for topic, _ in wanted})
            if it.partition in wanted and it.consumer_id == self._consumer_id
        }
        for partition in sorted(wanted):
            if partition not in self.epochs or now.get(partition) != self.epochs[partition]:
                raise StaleShareError(f"{partition} is not this consumer's any more")

    async def all_caught_up_for_s(self) -> float:
        """Return for how long nothing unread has been in any partition, whoever reads it."""
        now_us = unix_us(self._clock)
        since = await self._database.read(lambda it: _caught_up_since(it, now_us))
        return 0.0 if since is None else max(0.0, (now_us - since) / 1e6)

    def _settle(
        self,
        connection: Connection,
        partitions: Sequence[Partition],
        *,
        caught_up_for_s: float,
        is_new: bool = False,
    ) -> Mapping[Partition, int]:
        now_us = unix_us(self._clock)
        num_members = self._join(connection, now_us)
        rows = [_free_row(partition) for partition in sorted(partitions)]
        insert_new(connection, _leases, rows)
        leases = self._those_there(connection, partitions)
        fair = math.ceil(len(partitions) / num_members)
        mine = [it for it in leases if it.consumer_id == self._consumer_id]
        for lease in mine[fair:]:
            self._write(connection, lease.partition, _free_row(lease.partition))
        kept = {it.partition: it.epoch + is_new for it in mine[:fair]}
        for lease in leases:
            if len(kept) == fair:
                break
            is_free = not lease.consumer_id or lease.expires_unix_us < now_us
            if is_free and lease.consumer_id != self._consumer_id:
                kept[lease.partition] = lease.epoch + 1
        since = now_us - round(caught_up_for_s * 1e6) if caught_up_for_s else 0
        for partition, epoch in kept.items():
            row: Mapping[str, str | int] = {
                "consumer_id": self._consumer_id,
                "epoch": epoch,
                "expires_unix_us": now_us + self._lease_us,
                "caught_up_unix_us": since,
            }
            self._write(connection, partition, row)
        return kept

    def _those_there(self, connection: Connection, partitions: Sequence[Partition]) -> list[_Lease]:
        """Return the leases of *partitions*, and mark others as gone.

        A log that began anew may have fewer: what is not there is nobody's share, and nobody waits
        for it to be read.
        """
        there = set(partitions)
        known = _read(connection, {topic for topic, _ in partitions})
        for lease in known:
            if lease.partition not in there and lease.expires_unix_us != _GONE:
                row = {**_free_row(lease.partition), "expires_unix_us": _GONE}
                self._write(connection, lease.partition, row)
        # By number before topic, so that everybody gets a part of each topic.
        return sorted(
            (it for it in known if it.partition in there), key=lambda it: it.partition[::-1]
        )

    def _join(self, connection: Connection, now_us: int) -> int:
        """Say that this member lives; return how many do."""
        put(
            connection,
            _consumers,
            [{"consumer_id": self._consumer_id, "seen_unix_us": now_us}],
        )
        gone = _consumers.c.seen_unix_us < now_us - self._lease_us
        connection.execute(delete(_consumers).where(gone))
        return len(connection.execute(select(_consumers.c.consumer_id)).all())

    def _write(
        self, connection: Connection, partition: Partition, row: Mapping[str, str | int]
    ) -> None:
        values = {name: value for name, value in row.items() if name not in ("topic", "partition")}
        if not row["consumer_id"]:
            # A partition that is let go keeps its epoch: the next owner's must be a new one.
            values.pop("epoch", None)
        connection.execute(update(_leases).where(_is(partition)).values(**values))

    def _release(self, connection: Connection) -> None:
        mine = _leases.c.consumer_id == self._consumer_id
        connection.execute(
            update(_leases)
            .where(mine)
            .values(consumer_id="", expires_unix_us=0, caught_up_unix_us=0)
        )
        this = _consumers.c.consumer_id == self._consumer_id
        connection.execute(delete(_consumers).where(this))


def _free_row(partition: Partition) -> Mapping[str, str | int]:
    return {
        "topic": partition[0],
        "partition": partition[1],
        "consumer_id": "",
        "epoch": 0,
        "expires_unix_us": 0,
        "caught_up_unix_us": 0,
    }


def _is(partition: Partition) -> ColumnElement[bool]:
    return (_leases.c.topic == partition[0]) & (_leases.c.partition == partition[1])


def _read(connection: Connection, topics: set[str]) -> list[_Lease]:
    """Return the leases, locked until the transaction ends, always in the same order."""
    query = (
        select(_leases)
        .where(_leases.c.topic.in_(topics))
        .order_by(_leases.c.topic, _leases.c.partition)
        .with_for_update()
    )
    return [
        _Lease((row.topic, row.partition), row.consumer_id, row.epoch, row.expires_unix_us)
        for row in connection.execute(query)
    ]


def _caught_up_since(connection: Connection, now_us: int) -> int | None:
    rows = connection.execute(select(_leases).where(_leases.c.expires_unix_us != _GONE)).all()
    if not rows or any(row.expires_unix_us < now_us or not row.caught_up_unix_us for row in rows):
        return None
    return int(max(row.caught_up_unix_us for row in rows))
