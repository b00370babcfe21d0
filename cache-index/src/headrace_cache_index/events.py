"""Pure: what a publisher's messages mean, in which order they may be applied, and what to ask for.

`Gate` is the state machine of one publisher's stream::

            gap seen                      no replay in time, or the base is gone
    FOLLOWING ----> REPLAY --------------------> SNAPSHOT
        ^  ^----------' wanted batch came            |
        '--------------------------------------------' last part of a snapshot came

Only FOLLOWING and REPLAY apply batches, and only the next one in sequence; everything at or below
the watermark is a duplicate. So whatever is lost, doubled or reordered on the way, the index holds
the state after some prefix of the worker's log, and asks until it holds all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from headrace_common.clock import Clock
from headrace_common.errors import InvalidRequest
from headrace_common.kv_index import TIERS, Tier, shorten
from headrace_contracts.cache_index.v1.cache_index_pb2 import (
    BlocksRemoved,
    BlocksStored,
    KvEventBatch,
    PublishReply,
    Snapshot,
)

# What is kept of a snapshot that is too large: the rest is room for what comes next.
KEPT_RATIO = 0.75
# A publisher that leaves a request unanswered for this long is asked again, for a snapshot.
PATIENCE_S = 2.0


@dataclass(slots=True)
class Change:
    """The net effect of one batch: clear if `cleared`, then remove, then add."""

    seq: int
    cleared: bool = False
    added: dict[Tier, set[bytes]] = field(default_factory=dict)
    removed: dict[Tier, set[bytes]] = field(default_factory=dict)

    def tiers(self) -> list[Tier]:
        """Return the tiers that change, in fixed order."""
        return [tier for tier in TIERS if self.added.get(tier) or self.removed.get(tier)]


@dataclass(slots=True)
class Replacement:
    """Everything a replica holds after batch `seq`."""

    seq: int
    blocks: dict[Tier, set[bytes]] = field(default_factory=dict)

    def num_blocks(self) -> int:
        """Count the blocks of all tiers."""
        return sum(len(blocks) for blocks in self.blocks.values())


@dataclass(slots=True)
class _Assembly:
    """The parts of a snapshot that have come, in order: parents before their children."""

    seq: int
    blocks: dict[tuple[Tier, bytes], None] = field(default_factory=dict)

    def add(self, tier: Tier, hashes: list[bytes], limit_blocks: int) -> None:
        # One more than the limit is enough to know that it is exceeded.
        room = limit_blocks + 1 - len(self.blocks)
        self.blocks.update(dict.fromkeys((tier, one) for one in hashes[: max(0, room)]))

    def finish(self, limit_blocks: int) -> Replacement:
        whole = Replacement(self.seq)
        is_over = len(self.blocks) > limit_blocks
        kept = int(limit_blocks * KEPT_RATIO) if is_over else len(self.blocks)
        for tier, one in islice(self.blocks, kept):
            whole.blocks.setdefault(tier, set()).add(one)
        return whole


def fold(batch: KvEventBatch) -> Change:
    """Fold the events of a batch, in order, into their net effect.

    Raises:
        InvalidRequest: hashes are cut or the tier is not named.
    """
    change = Change(batch.seq)
    for event in batch.events:
        match event.WhichOneof("kind"):
            case "stored":
                _move(event.stored, to=change.added, out_of=change.removed)
            case "removed":
                _move(event.removed, to=change.removed, out_of=change.added)
            case "cleared":
                change.cleared = True
                change.added.clear()
                change.removed.clear()
            case _:
                raise InvalidRequest("An event of an unknown kind.", param="batch.events")
    return change


def unpack(blocks: BlocksStored | BlocksRemoved) -> tuple[Tier, list[bytes]]:
    """Return the tier and the 8-byte hashes of an event.

    Raises:
        InvalidRequest: hashes are cut or the tier is not named.
    """
    if blocks.tier not in TIERS:
        raise InvalidRequest("Every event names its tier.", param="tier")
    try:
        return blocks.tier, shorten(blocks.block_hashes)
    except ValueError as error:
        raise InvalidRequest(str(error), param="block_hashes") from error


def _move(
    blocks: BlocksStored | BlocksRemoved,
    *,
    to: dict[Tier, set[bytes]],
    out_of: dict[Tier, set[bytes]],
) -> None:
    tier, hashes = unpack(blocks)
    to.setdefault(tier, set()).update(hashes)
    if tier in out_of:
        out_of[tier].difference_update(hashes)


class Mode(Enum):
    """What a gate waits for."""

    FOLLOWING = "following"
    REPLAY = "replay"
    SNAPSHOT = "snapshot"


class Gate:
    """Lets the batches of one publisher through in sequence; see the module's drawing.

    A batch let through is *accepted*; it counts as durable only once `applied` says so.

    Args:
        limit_blocks: of a snapshot above this only the beginning is taken. May be changed.
        clock: for the patience with unanswered requests.
    """

    def __init__(self, limit_blocks: int, clock: Clock) -> None:
        self.limit_blocks, self._clock = limit_blocks, clock
        self._assembling: _Assembly | None = None
        self._asked_at_s, self._unreadable_at_s = 0.0, -math.inf
        self.mode = Mode.FOLLOWING
        # Last batch that is in the index, and the next one to let through.
        self.seq = 0
        self.next_seq = 1
        self.num_gaps = 0

    def open(self, next_seq: int, known_seq: int | None) -> PublishReply:
        """Answer a Hello.

        Args:
            next_seq: the publisher's next batch.
            known_seq: last batch in the index; None = it knows nothing of this incarnation.
        """
        self._set(known_seq or 0)
        if known_seq is None and next_seq > 1:
            return self.want_snapshot()
        if next_seq > self.next_seq:
            return self._want_replay()
        return PublishReply(acknowledged_seq=self.seq)

    def take_batch(self, batch: KvEventBatch) -> Change | PublishReply | None:
        """Return the change to apply now, or what to answer, or None.

        Raises:
            InvalidRequest: the batch is malformed; see `unreadable`.
        """
        if batch.seq < self.next_seq:
            return PublishReply(acknowledged_seq=self.seq)
        if self.mode is Mode.SNAPSHOT:
            return self.ask_again()
        if batch.seq > self.next_seq:
            if self.mode is Mode.REPLAY:
                return self.ask_again()
            self.num_gaps += 1
            return self._want_replay()
        change = fold(batch)
        self.next_seq, self.mode = batch.seq + 1, Mode.FOLLOWING
        return change

    def take_snapshot(self, part: Snapshot) -> Replacement | PublishReply | None:
        """Collect a part; return the whole once the last one is here.

        Raises:
            InvalidRequest: it is malformed.
        """
        self._asked_at_s = self._clock.now_s()
        assembly = self._assembling
        if assembly is None or assembly.seq != part.as_of_seq:
            assembly = self._assembling = _Assembly(part.as_of_seq)
        for blocks in part.blocks:
            assembly.add(*unpack(blocks), self.limit_blocks)
        if not part.last:
            return None
        self._assembling = None
        whole = assembly.finish(self.limit_blocks)
        if whole.seq < self.seq and self.mode is not Mode.SNAPSHOT:
            # Older than what the index holds already.
            return PublishReply(acknowledged_seq=self.seq)
        return whole

    def applied(self, seq: int) -> PublishReply:
        """Record that the index now is as of *seq*, whole."""
        self.seq = seq
        return PublishReply(acknowledged_seq=seq)

    def replaced(self, seq: int) -> PublishReply:
        """Record that a snapshot as of *seq* is the index now."""
        self._set(seq)
        self.mode = Mode.FOLLOWING
        return PublishReply(acknowledged_seq=seq)

    def fell_back(self, seq: int) -> PublishReply:
        """Record that the index turned out to be as of *seq*, behind what was accepted."""
        self._set(seq)
        self.num_gaps += 1
        return self._want_replay()

    def base_lost(self, seq: int) -> PublishReply:
        """Record that the index holds nothing of this replica, as of *seq*."""
        self._set(seq)
        return self.want_snapshot()

    def unreadable(self) -> PublishReply | None:
        """Record that a batch cannot be read: only a snapshot tells what it said.

        A publisher all of whose batches are like that is asked every few seconds.
        """
        self.num_gaps += 1
        now_s = self._clock.now_s()
        if now_s - self._unreadable_at_s >= PATIENCE_S:
            self._unreadable_at_s = now_s
            return self.want_snapshot()
        self.mode, self._asked_at_s, self._assembling = Mode.SNAPSHOT, now_s, None
        return None

    def messages_dropped(self) -> PublishReply | None:
        """Record that batches were dropped unread."""
        return self._want_replay() if self.mode is Mode.FOLLOWING else None

    def want_snapshot(self) -> PublishReply:
        """Ask for everything."""
        self.mode, self._asked_at_s = Mode.SNAPSHOT, self._clock.now_s()
        self._assembling = None
        return PublishReply(snapshot_wanted=True)

    def ask_again(self) -> PublishReply | None:
        """Ask for a snapshot if the publisher left the last request unanswered for too long."""
        if self.mode is Mode.FOLLOWING or self._clock.now_s() - self._asked_at_s < PATIENCE_S:
            return None
        return self.want_snapshot()

    def _set(self, seq: int) -> None:
        self.seq, self.next_seq = seq, seq + 1

    def _want_replay(self) -> PublishReply:
        self.mode, self._asked_at_s = Mode.REPLAY, self._clock.now_s()
        return PublishReply(replay_from_seq=self.next_seq)
