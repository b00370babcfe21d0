"""Pure: a replica whose report stream is broken gets nothing.

Inputs: whether the router's stream to the worker stands. A crashed worker shows here first, within
the time that a closed connection takes; its requests fail or move on elsewhere.
"""

from __future__ import annotations

from typing import Final

from headrace_router.replicas import Replica

UNREACHABLE: Final = "unreachable"


def reason(replica: Replica, _now_s: float) -> str:
    """Name what forbids the replica; empty = nothing."""
    return "" if replica.is_reachable else UNREACHABLE
