"""Pure: a replica on which this very request failed is not tried again.

Inputs: what the request excludes, by incarnation: a worker that came back is another replica.
"""

from __future__ import annotations

from typing import Final

from headrace_common.kv_index import ReplicaKey
from headrace_router.candidate import Query

EXCLUDED: Final = "excluded"


def reason(query: Query, key: ReplicaKey) -> str:
    """Name what forbids the replica to the request; empty = nothing."""
    return EXCLUDED if key in query.excluded else ""
