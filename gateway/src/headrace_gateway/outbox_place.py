"""Which folder an outbox has: one writer each, held by a lock that ends with its process."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


class OutboxInUseError(Exception):
    """Another process writes to the folder."""


@dataclass(frozen=True)
class OutboxPlace:
    """A folder and the lock on it; `release` gives both back."""

    folder: Path
    descriptor: int

    def release(self) -> None:
        """Let another process have the folder."""
        os.close(self.descriptor)


def take_place(folder: Path, num_seats: int = 0) -> OutboxPlace:
    """Take *folder*, or the first free one of its folders ``1`` to *num_seats*.

    Numbered, so that gateways that start later find what gateways of another name left there.

    Raises:
        OutboxInUseError: other processes have them all.
    """
    for place in _candidates(folder, num_seats):
        place.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(place / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
        else:
            return OutboxPlace(place, descriptor)
    if num_seats:
        raise OutboxInUseError(f"other gateways have all {num_seats} seats of the outbox {folder}")
    raise OutboxInUseError(
        f"another gateway uses the outbox {folder}; give each its own folder, or the folder seats"
    )


def _candidates(folder: Path, num_seats: int) -> Iterator[Path]:
    if not num_seats:
        yield folder
    for number in range(1, num_seats + 1):
        yield folder / str(number)
