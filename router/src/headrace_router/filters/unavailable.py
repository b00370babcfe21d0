"""Pure: the filters that look at a replica alone, in a row. Waiting would not help against any."""

from __future__ import annotations

from headrace_router.filters import fresh, reachable, role, state
from headrace_router.replicas import Replica

_FILTERS = (reachable.reason, state.reason, fresh.reason, role.reason)


def unavailable(replica: Replica, now_s: float) -> str:
    """Name the first filter that forbids *replica* to every request; empty = none."""
    for reason in _FILTERS:
        if found := reason(replica, now_s):
            return found
    return ""
