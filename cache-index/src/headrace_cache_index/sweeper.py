"""Drops replicas whose publisher's lease ended."""

from __future__ import annotations

import logging

from headrace_cache_index.metrics import CacheIndexMetrics
from headrace_cache_index.store import Store
from headrace_common.clock import Clock
from headrace_common.kv_index import ReplicaKey

_log = logging.getLogger(__name__)


class Sweeper:
    """Looks for ended leases.

    Args:
        store: the index.
        clock: wall time, to leave live leases alone cheaply; the script decides by Redis's time.
        metrics: what is counted.
    """

    def __init__(self, store: Store, clock: Clock, metrics: CacheIndexMetrics) -> None:
        self._store, self._clock, self._metrics = store, clock, metrics

    async def sweep(self) -> int:
        """Drop what has no lease any more; return how many replicas that was.

        Raises:
            Unavailable: Redis cannot answer.
        """
        now_ms = self._clock.unix_s() * 1000
        num_dropped = 0
        for worker_id, entry in (await self._store.registry()).items():
            if entry.lease_unix_ms > now_ms:
                continue
            replica = ReplicaKey(worker_id, entry.incarnation)
            if await self._store.drop_expired(replica, entry.model):
                _log.info("%s dropped: its publisher's lease ended", replica)
                self._metrics.dropped.inc()
                num_dropped += 1
        return num_dropped
