"""What changed in the cache, numbered, so that an index elsewhere can follow.

One batch per engine step that changed something. Batches of the recent past are kept for replay;
whoever missed more takes a snapshot. A batch's number and the snapshot's `as_of_seq` fit together:
snapshot, then every later batch, gives the present state.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stored:
    """Blocks that the cache now holds: a chain, parents first."""

    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True)
class Removed:
    """Blocks that the cache no longer holds."""

    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True)
class Cleared:
    """The cache is empty."""


Event = Stored | Removed | Cleared


@dataclass(frozen=True)
class Batch:
    """The changes of one step, in order. Numbers start at 1 and grow by 1."""

    seq: int
    events: tuple[Event, ...]


class BlockEventLog:
    """Collects changes on the engine's thread; read from any thread.

    Args:
        num_kept: batches kept for replay.
        index_stride: of a chain only every n-th block is told.
    """

    def __init__(self, num_kept: int = 4096, index_stride: int = 1) -> None:
        self.index_stride = index_stride
        # What was told and not yet removed; the engine's thread has its own view.
        self._told: set[bytes] = set()
        self._open: list[Event] = []
        self._kept: deque[Batch] = deque(maxlen=num_kept)
        self._held: dict[bytes, None] = {}
        self._last_seq = 0
        self._lock = threading.Lock()
        self._on_batch: Callable[[], None] = _ignore

    @property
    def last_seq(self) -> int:
        """Number of the newest batch; 0 = none yet."""
        return self._last_seq

    def subscribe(self, on_batch: Callable[[], None]) -> None:
        """Call *on_batch* on the engine's thread after each batch; it must return at once."""
        self._on_batch = on_batch

    def stored(self, block_hashes: Sequence[bytes]) -> None:
        """Note new blocks. Engine thread only."""
        self._open.append(Stored(tuple(block_hashes)))
        self._told.update(block_hashes)

    def removed(self, block_hash: bytes) -> None:
        """Note a lost block, unless nobody was told of it. Engine thread only."""
        if block_hash not in self._told:
            return
        self._told.discard(block_hash)
        last = self._open[-1] if self._open else None
        if isinstance(last, Removed):
            self._open[-1] = Removed((*last.block_hashes, block_hash))
        else:
            self._open.append(Removed((block_hash,)))

    def cleared(self) -> None:
        """Note that all is gone. Engine thread only."""
        self._open = [Cleared()]
        self._told.clear()

    def flush(self) -> Batch | None:
        """Close the step's batch; None if nothing changed. Engine thread only."""
        if not self._open:
            return None
        with self._lock:
            batch = Batch(self._last_seq + 1, tuple(self._open))
            self._last_seq = batch.seq
            self._kept.append(batch)
            for event in batch.events:
                self._apply(event)
        self._open = []
        self._on_batch()
        return batch

    def since(self, seq: int) -> list[Batch] | None:
        """Return the batches from number *seq* on; None if some of them are no longer kept."""
        with self._lock:
            if seq > self._last_seq:
                return []
            if not self._kept or self._kept[0].seq > seq:
                return None
            return [batch for batch in self._kept if batch.seq >= seq]

    def snapshot(self) -> tuple[int, list[bytes]]:
        """Return (number of the last batch, all hashes held after it, parents first)."""
        with self._lock:
            return self._last_seq, list(self._held)

    def _apply(self, event: Event) -> None:
        match event:
            case Stored(block_hashes):
                self._held.update(dict.fromkeys(block_hashes))
            case Removed(block_hashes):
                for block_hash in block_hashes:
                    self._held.pop(block_hash, None)
            case Cleared():
                self._held.clear()


def _ignore() -> None:
    """Default subscriber."""
