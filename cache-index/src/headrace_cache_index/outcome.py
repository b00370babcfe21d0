"""Pure: what became of a write to the index."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Status(StrEnum):
    """How a write ended. The Lua scripts answer with these words."""

    # The index is as of `seq`; a duplicate ends so too.
    APPLIED = "APPLIED"
    # The incarnation was not known and now is the live one.
    NEW = "NEW"
    # The incarnation is live already.
    KNOWN = "KNOWN"
    # Batches before this one are missing; `seq` is the last one held.
    GAP = "GAP"
    # The index knows no such worker: its data is gone or the lease ended.
    LOST = "LOST"
    # A newer incarnation of the worker is live.
    SUPERSEDED = "SUPERSEDED"
    # More blocks than the capacity: the replica's blocks were dropped, as of `seq`.
    OVERFLOW = "OVERFLOW"


class Outcome(NamedTuple):
    """A status and the last batch that the index holds."""

    status: Status
    seq: int
