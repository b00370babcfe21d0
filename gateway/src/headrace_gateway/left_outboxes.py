"""Outboxes in a shared folder that no process has: what is in them goes to the ledger too.

A gateway takes the first free seat (`outbox_place`). One that left while the broker was away, or
that was killed, may leave events in a seat that the next process has no need of, and they would lie
there until some process took it. So each gateway with seats looks after one such place at a time:
takes it, as its next owner would, closes what was left open, relays, and gives it back empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from headrace_gateway.outbox_place import OutboxInUseError, take_place
from headrace_gateway.segments import list_segments, segment_path

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 5.0
_EMPTY_POLL_S = 0.5
# After a minute the next place has its turn: this one may be one that never gets empty.
_TURN_POLLS = 120


class Emptied(Protocol):
    """A usage log on such a place, as `OutboxUsageLog` is one."""

    @property
    def is_empty(self) -> bool:
        """Whether the ledger has everything."""
        ...

    async def start(self) -> None:
        """Take the place; raise `OutboxInUseError` if another process has it."""
        ...

    async def close(self) -> None:
        """Give the place back."""
        ...


class LeftOutboxes:
    """Empties what others have left in a folder. Belongs to one event loop.

    Args:
        folder: the shared folder; an outbox may lie in it itself, from before it had seats.
        open_log: makes a usage log for a place, not started.
    """

    def __init__(self, folder: Path, open_log: Callable[[Path], Emptied]) -> None:
        self._folder, self._open_log = folder, open_log

    async def keep(self) -> None:
        """Look again and again until cancelled; run under `supervise`."""
        while True:
            for place in await asyncio.to_thread(lambda: list(places_with_events(self._folder))):
                await self._empty(place)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _empty(self, place: Path) -> None:
        try:
            # Looked at before anything is made for it: most are in use, ours for one.
            take_place(place).release()
            log = self._open_log(place)
            await log.start()
        except OutboxInUseError:
            return
        try:
            _log.info("taking over what a gateway has left in %s", place)
            for _ in range(_TURN_POLLS):
                if log.is_empty:
                    break
                await asyncio.sleep(_EMPTY_POLL_S)
        finally:
            await log.close()


def places_with_events(folder: Path) -> Iterator[Path]:
    """Yield the folder and its seats, as far as events lie there."""
    for place in (folder, *sorted(it for it in folder.glob("*") if it.name.isdecimal())):
        with contextlib.suppress(OSError):
            sizes = (segment_path(place, it).stat().st_size for it in list_segments(place))
            if any(sizes):
                yield place
