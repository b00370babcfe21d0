"""How often a tenant may call what no limit of its keys counts: lists, files, batches, usage.

Such a call generates nothing, but it takes the loop that everybody's streams share, and a turn at a
database. Each process counts by itself: what it protects is its own.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from headrace_common.clock import Clock
from headrace_common.errors import RateLimited

# So many seconds' worth may come at once.
_BURST_S = 2.0
_MAX_TENANTS = 10_000


class CallRate:
    """A rate for each tenant (GCRA, as in `headrace_common.limits`). Belongs to one event loop.

    Args:
        per_s: calls a second; 0 = as many as come.
        clock: time.
    """

    def __init__(self, per_s: float, clock: Clock) -> None:
        self._per_s, self._clock = per_s, clock
        # So much of the future may be used up at once: at least one call's worth.
        self._window_s = max(_BURST_S, 1 / per_s) if per_s else _BURST_S
        # Until when each tenant has used its rate up; who used nothing for longest comes first.
        self._used_until_s: OrderedDict[str, float] = OrderedDict()

    def count(self, tenant_id: str) -> None:
        """Count a call.

        Raises:
            RateLimited: it is one too many, and is not counted.
        """
        if not self._per_s:
            return
        now_s = self._clock.now_s()
        begin_s = max(now_s, self._used_until_s.get(tenant_id, now_s))
        end_s = begin_s + 1 / self._per_s
        wait_s = end_s - now_s - self._window_s
        # Sums of floats: what is due is due.
        if wait_s > 1e-6:
            raise self._refusal(wait_s)
        self._used_until_s[tenant_id] = end_s
        self._used_until_s.move_to_end(tenant_id)
        if len(self._used_until_s) > _MAX_TENANTS:
            self._used_until_s.popitem(last=False)

    def _refusal(self, wait_s: float) -> RateLimited:
        error = RateLimited(
            f"This organization may make {self._per_s:g} calls a second beside those that use a "
            f"model. Try again in {wait_s:.2f} s.",
            retry_after_s=wait_s,
        )
        quota = round(self._per_s * self._window_s)
        error.metadata["ratelimit-policy"] = (
            f'"organization-calls";q={quota};qu="requests";w={math.ceil(self._window_s)}'
        )
        error.metadata["ratelimit"] = f'"organization-calls";r=0;t={math.ceil(wait_s)}'
        return error
