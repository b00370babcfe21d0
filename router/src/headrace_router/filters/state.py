"""Pure: only a replica that calls itself ready gets requests.

Inputs: the state in its last report: loading its model, draining before it ends, or stuck, when a
step of its engine does not come back.
"""

from __future__ import annotations

from typing import Final

from headrace_contracts.worker.v1.worker_pb2 import (
    WORKER_STATE_DRAINING,
    WORKER_STATE_READY,
    WORKER_STATE_STUCK,
)
from headrace_router.replicas import Replica

LOADING: Final = "loading"
_NAMES = {WORKER_STATE_READY: "", WORKER_STATE_DRAINING: "draining", WORKER_STATE_STUCK: "stuck"}


def reason(replica: Replica, _now_s: float) -> str:
    """Name what forbids the replica; empty = nothing."""
    return _NAMES.get(replica.state, LOADING)
