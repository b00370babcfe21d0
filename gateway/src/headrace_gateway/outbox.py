"""Usage events on disk until the ledger has them: the gateway's outbox.

Events get a sequence number, wait in memory for the next group commit, and are then written and
synced together by a thread of the outbox's own. While the disk works, further events gather: the
group grows with the load. An event that nobody waits for lingers up to 5 ms, so that it shares a
sync with others. Behind a group of several requests the next one begins 2 ms later at the
earliest: a commit costs some 200 us of CPU, whatever it holds, and who waits alone is spared that.

::

    append -> queue -> [group] -> write + fdatasync -> durable -> read by the relay -> deleted
                ^_________________| the disk refuses: waiters get Unavailable, the events stay

The folder holds `lock` (one process at a time), `id`, `position` (see `relay`) and the segments
(see `segments`). The newest segment is never deleted: its name carries the sequence number over a
restart.

Long because queue, commits and recovery share one state.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace_common.call_thread import CallThread
from headrace_common.clock import Clock
from headrace_common.errors import Unavailable
from headrace_common.ids import ulid
from headrace_common.lifecycle import cancel_and_wait
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent
from headrace_gateway.outbox_metrics import OutboxMetrics
from headrace_gateway.outbox_place import OutboxPlace, take_place
from headrace_gateway.segments import (
    Position,
    SegmentWriter,
    encode_frame,
    list_segments,
    read_frames,
    read_segment,
    repair,
    replace_file,
    segment_path,
)

_log = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 2**30
SEGMENT_BYTES = 2**20
# Short, because only a finished segment can be confirmed and deleted.
SEGMENT_AGE_S = 5.0
LINGER_S = 0.005
SPACING_S = 0.002
# A request has two.
_EVENTS_OF_ONE = 2
GROUP_EVENTS = 64
_MAX_GROUP_EVENTS = 1024
# Between two tries while the disk refuses.
RETRY_S = 0.25


@dataclass
class _Entry:
    """An event in the queue and who waits for it."""

    seq: int
    frame: bytes
    waiter: asyncio.Future[None] | None


@dataclass(frozen=True)
class Batch:
    """Payloads read from one segment, and where reading goes on."""

    payloads: list[bytes]
    end: Position


class Outbox:
    """The events of one gateway process. Belongs to one event loop.

    Args:
        folder: its own; made if absent.
        num_seats: not 0 = the folder is shared, see `take_place`.
        clock: for the age of segments.
        metrics: see `OutboxMetrics`.
        max_bytes: above this much on disk `is_full` is true.
        segment_bytes: a segment at least this large is finished.
        segment_age_s: likewise, one that old.
    """

    def __init__(
        self,
        folder: Path,
        clock: Clock,
        metrics: OutboxMetrics,
        *,
        num_seats: int = 0,
        max_bytes: int = DEFAULT_MAX_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
        segment_age_s: float = SEGMENT_AGE_S,
    ) -> None:
        # Final once started.
        self.folder = folder
        self._num_seats = num_seats
        self.outbox_id = ""
        # Sequence number of the last event that is safe on disk; 0 = none ever.
        self.durable_seq = 0
        # Set at each commit; the relay waits for it and clears it.
        self.grown = asyncio.Event()
        self._clock, self._metrics = clock, metrics
        self._max_bytes, self._segment_bytes = max_bytes, segment_bytes
        metrics.limit_bytes.set(max_bytes)
        self._segment_age_s = segment_age_s
        self._sizes: dict[int, int] = {}
        self._queue: deque[_Entry] = deque()
        self._queued = asyncio.Event()
        self._hurry = asyncio.Event()
        self._next_seq = 1
        self._refused = False
        self._writer: SegmentWriter | None = None
        self._begun_s = 0.0
        self._place: OutboxPlace | None = None
        self._thread = CallThread("outbox")
        # When the next commit may begin, by the loop's clock.
        self._next_commit_s = 0.0
        self._committing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_full(self) -> bool:
        """Whether new work must wait: too much on disk, or the disk refuses writes."""
        return self._refused or self.size_bytes >= self._max_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments on disk."""
        return sum(self._sizes.values())

    async def start(self) -> list[UsageEvent]:
        """Take the folder, repair it, and begin to write.

        Returns:
            Opened events without a closed one: their process died.

        Raises:
            OutboxInUseError: another process has the folder.
        """
        try:
            orphans = await self._thread.run(self._recover)
        except BaseException:
            self._unlock()
            self._thread.close(wait=False)
            raise
        self._task = asyncio.create_task(self._commit_forever())
        return orphans

    def append(self, event: UsageEvent) -> None:
        """Stamp and queue an event; durable within some milliseconds if the disk is well."""
        self._put(event, None)

    def append_hurried(self, event: UsageEvent) -> asyncio.Future[None]:
        """Stamp and queue an event that somebody waits for; the result says when it is on disk.

        It fails with `Unavailable` if the disk refused. The event stays queued and is tried again.
        """
        waiter = self.append_watched(event)
        self.hurry()
        return waiter

    def append_watched(self, event: UsageEvent) -> asyncio.Future[None]:
        """Stamp and queue an event as `append` does; the result says when it is on disk."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._put(event, waiter)
        return waiter

    def hurry(self) -> None:
        """Write what is queued now: somebody waits."""
        self._hurry.set()

    async def close(self) -> None:
        """Write what is queued, if the disk lets, and give the folder back."""
        await cancel_and_wait(self._task)
        await self._commit()
        while self._queue and not self._refused:
            await self._commit()
        await self._thread.run(self._shut)
        self._thread.close()

    async def read(self, start: Position, max_events: int) -> Batch:
        """Read durable events from *start* on, out of one segment. Empty: there are no more yet."""
        position = self._settle(start)
        while position.segment in self._sizes:
            # Looked up before the read: a segment that had a follower then has its final size.
            following = next((s for s in self._sizes if s > position.segment), None)
            payloads, offset = await asyncio.to_thread(
                read_frames, self.folder, position, self._sizes[position.segment], max_events
            )
            if payloads or following is None:
                return Batch(payloads, Position(position.segment, offset))
            position = Position(following, 0)
        return Batch([], position)

    @property
    def newest_segment(self) -> int:
        """The segment that is written to."""
        return max(self._sizes, default=0)

    def finished_segments(self) -> list[int]:
        """Return the segments that nothing is added to any more, oldest first."""
        return [segment for segment in self._sizes if segment != self.newest_segment]

    async def read_finished(self, segment: int) -> list[bytes]:
        """Return all payloads of a finished segment."""
        return await asyncio.to_thread(lambda: list(read_segment(self.folder, segment)))

    async def delete(self, segment: int) -> None:
        """Forget a finished segment."""
        if segment not in self.finished_segments():
            raise ValueError(f"segment {segment} is not finished")
        await asyncio.to_thread(segment_path(self.folder, segment).unlink, missing_ok=True)
        self._sizes.pop(segment, None)

    def _settle(self, start: Position) -> Position:
        # A segment that is gone was confirmed; go on with the next that exists.
        if start.segment in self._sizes:
            return start
        return Position(next((s for s in self._sizes if s > start.segment), start.segment), 0)

    def _put(self, event: UsageEvent, waiter: asyncio.Future[None] | None) -> None:
        event.outbox_id, event.outbox_seq = self.outbox_id, self._next_seq
        self._queue.append(_Entry(self._next_seq, encode_frame(event.SerializeToString()), waiter))
        self._next_seq += 1
        self._queued.set()
        if len(self._queue) >= GROUP_EVENTS:
            self._hurry.set()

    async def _commit_forever(self) -> None:
        while True:
            if not self._queue:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S if self._refused else self._segment_age_s):
                        await self._queued.wait()
            if self._queue:
                await self._linger()
                # Shielded: `close` cancels this loop, but a write under way is always finished.
                await asyncio.shield(self._commit())
            elif self._refused or self._is_old():
                await asyncio.shield(self._turn_page())

    async def _linger(self) -> None:
        if self._refused:
            await asyncio.sleep(RETRY_S)
        elif not self._hurry.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    await self._hurry.wait()
        early_s = self._next_commit_s - asyncio.get_running_loop().time()
        if early_s > 0:
            await asyncio.sleep(early_s)
        self._hurry.clear()

    async def _commit(self) -> None:
        async with self._committing:
            group = list(itertools.islice(self._queue, _MAX_GROUP_EVENTS))
            if not group:
                return
            if len(group) > _EVENTS_OF_ONE:
                self._next_commit_s = asyncio.get_running_loop().time() + SPACING_S
            try:
                await self._thread.run(partial(self._write, group))
            except OSError as error:
                self._note_failure(group, error)
            else:
                self._note_success(group)

    async def _turn_page(self) -> None:
        async with self._committing:
            try:
                await self._thread.run(partial(self._begin_segment, self._next_seq))
            except OSError as error:
                self._note_failure([], error)
            else:
                self._note_success([])

    def _note_success(self, group: list[_Entry]) -> None:
        self._refused = False
        if self._writer is not None:
            self._sizes[self._writer.segment] = self._writer.size_bytes
        for entry in group:
            self._queue.popleft()
            self.durable_seq = entry.seq
            if entry.waiter is not None and not entry.waiter.done():
                entry.waiter.set_result(None)
        if not self._queue:
            self._queued.clear()
        self.grown.set()

    def _note_failure(self, group: list[_Entry], error: OSError) -> None:
        if not self._refused:
            _log.error("the outbox cannot be written, new requests are refused: %s", error)
        self._refused = True
        self._metrics.write_failures.inc()
        for entry in group:
            if entry.waiter is not None and not entry.waiter.done():
                entry.waiter.set_exception(
                    Unavailable("Usage cannot be recorded at the moment. Try again later.")
                )
                # Seen, whether anybody waits or not.
                entry.waiter.exception()
            entry.waiter = None

    # Below: on the outbox's thread.

    def _is_old(self) -> bool:
        writer = self._writer
        if writer is None or not writer.size_bytes:
            return False
        return self._clock.now_s() - self._begun_s >= self._segment_age_s

    def _write(self, group: list[_Entry]) -> None:
        writer = self._writer
        if writer is None or writer.size_bytes >= self._segment_bytes or self._is_old():
            writer = self._begin_segment(group[0].seq)
        try:
            writer.append(b"".join(entry.frame for entry in group))
        except OSError:
            self._end_segment()
            raise

    def _begin_segment(self, first_seq: int) -> SegmentWriter:
        if self._writer is None or self._writer.segment != first_seq:
            self._end_segment()
            self._writer = SegmentWriter(self.folder, first_seq)
            self._begun_s = self._clock.now_s()
        return self._writer

    def _end_segment(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _recover(self) -> list[UsageEvent]:
        self._place = take_place(self.folder, self._num_seats)
        self.folder = self._place.folder
        self.outbox_id = self._read_id()
        opened: dict[str, UsageEvent] = {}
        closed: set[str] = set()
        for segment in list_segments(self.folder):
            self._next_seq = max(self._next_seq, segment)
            for event in self._recover_segment(segment):
                self._next_seq = max(self._next_seq, event.outbox_seq + 1)
                if event.kind == UsageEvent.KIND_OPENED:
                    opened[event.request_id] = event
                else:
                    closed.add(event.request_id)
        self.durable_seq = self._next_seq - 1
        self._begin_segment(self._next_seq)
        self._sizes[self._next_seq] = 0
        return [event for request_id, event in opened.items() if request_id not in closed]

    def _recover_segment(self, segment: int) -> Iterator[UsageEvent]:
        cut = repair(self.folder, segment)
        if cut:
            self._metrics.torn_bytes.inc(cut)
            _log.warning("outbox segment %d: cut %d bytes of torn frames", segment, cut)
        size_bytes = 0
        for payload in read_segment(self.folder, segment):
            size_bytes += len(encode_frame(payload))
            yield UsageEvent.FromString(payload)
        self._sizes[segment] = size_bytes

    def _read_id(self) -> str:
        path = self.folder / "id"
        if path.exists() and (text := path.read_text().strip()):
            return text
        outbox_id = ulid(self._clock)
        replace_file(path, outbox_id.encode())
        return outbox_id

    def _unlock(self) -> None:
        if self._place is not None:
            self._place.release()
            self._place = None

    def _shut(self) -> None:
        self._end_segment()
        self._unlock()
