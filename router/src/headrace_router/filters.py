"""Pure: which replicas may be picked at all. Each filter has a name, which explanations show."""

from __future__ import annotations

from typing import Final

from headrace_contracts.worker.v1.worker_pb2 import (
    POOL_ROLE_PREFILL,
    WORKER_STATE_DRAINING,
    WORKER_STATE_READY,
    WORKER_STATE_STUCK,
)
from headrace_router.load_guard import Load
from headrace_router.replicas import Replica

NO_ROOM: Final = "no_room"
EXCLUDED: Final = "excluded"
ROLE: Final = "role"
# Its breaker is open: it failed one request after another.
BROKEN: Final = "broken"
_STATE_NAMES = {WORKER_STATE_DRAINING: "draining", WORKER_STATE_STUCK: "stuck"}


def unavailable(replica: Replica, now_s: float) -> str:
    """Name what forbids *replica* for every request; empty = nothing. Waiting would not help."""
    if not replica.is_reachable:
        return "unreachable"
    if replica.state != WORKER_STATE_READY:
        return _STATE_NAMES.get(replica.state, "loading")
    if not replica.is_fresh(now_s):
        return "stale"
    return ROLE if replica.role == POOL_ROLE_PREFILL else ""


def has_room(replica: Replica, load: Load) -> bool:
    """Whether the worker takes one more request; if not, the request waits in the router."""
    max_requests = replica.report.max_requests
    return not max_requests or load.num_requests < max_requests
