"""Pure: a replica that has been silent gets nothing, though its connection stands.

Inputs: the age of its last report, which comes at least every 250 ms. A worker that was stopped or
hangs keeps its sockets open; only its silence shows.
"""

from __future__ import annotations

from typing import Final

from headrace_router.replicas import Replica

STALE: Final = "stale"


def reason(replica: Replica, now_s: float) -> str:
    """Name what forbids the replica; empty = nothing."""
    return "" if replica.is_fresh(now_s) else STALE
