"""Pure: a replica that runs as many requests as it may gets no more for now.

Inputs: its requests, counted at the decision, and the most it takes. The only filter for which
waiting helps: a request that finds no room anywhere queues in the router.
"""

from __future__ import annotations

from typing import Final

from headrace_router.replicas import Replica

NO_ROOM: Final = "no_room"


def reason(replica: Replica, num_requests: int) -> str:
    """Name what forbids the replica; empty = nothing."""
    max_requests = replica.report.max_requests
    return NO_ROOM if max_requests and num_requests >= max_requests else ""
