"""Pure: a replica that only computes prompts for others gets no requests of its own.

Inputs: the role it was started with. `pairs.py` chooses among those that this filter drops.
"""

from __future__ import annotations

from typing import Final

from headrace_contracts.worker.v1.worker_pb2 import POOL_ROLE_PREFILL
from headrace_router.replicas import Replica

ROLE: Final = "role"


def reason(replica: Replica, _now_s: float) -> str:
    """Name what forbids the replica; empty = nothing."""
    return ROLE if replica.role == POOL_ROLE_PREFILL else ""
