"""Pure: a replica that failed one request after another is left alone for a while.

Inputs: the replicas whose breaker is open (`breaker.py`), other routers' failures included.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from headrace_common.kv_index import ReplicaKey

BROKEN: Final = "broken"


def reason(key: ReplicaKey, broken: Collection[ReplicaKey]) -> str:
    """Name what forbids the replica; empty = nothing."""
    return BROKEN if key in broken else ""
