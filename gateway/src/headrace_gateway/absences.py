"""Models whose last replica went away a moment ago, and who waits for one to come back.

A replica that starts again is no reason to refuse, as long as somebody may wait for it. A model
that was never served, or has been gone for long, is not waited for, nor one whose replicas refuse.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Set as AbstractSet

from headrace_common.awake import awake_timeout

# Afterwards it is taken for gone: nobody waits any more.
_LATELY_S = 60.0
# What the router knows comes here so much later, at most. Seconds.
_LAG_S = 0.25
# A replica that has come back may be listed and not yet be picked, for so long at most.
_SETTLING_S = 5.0
# Further ones are refused at once: each holds its body, its lease and its connection.
_MAX_WAITING = 1000


class Absences:
    """Which models are served, and since when others are not. Belongs to one event loop."""

    def __init__(self) -> None:
        self._served: frozenset[str] = frozenset()
        self._gone_since_s: dict[str, float] = {}
        # Of those that have been gone before.
        self._back_since_s: dict[str, float] = {}
        self._num_waiting = 0
        # Set, and replaced, at each change.
        self._change = asyncio.Event()

    def note(self, served: AbstractSet[str]) -> None:
        """Take the models that have a usable replica now."""
        now_s = time.monotonic()
        gone, back = self._served - served, (served - self._served) & self._gone_since_s.keys()
        self._gone_since_s.update(dict.fromkeys(gone, now_s))
        self._back_since_s.update(dict.fromkeys(back, now_s))
        self._served = frozenset(served)
        change, self._change = self._change, asyncio.Event()
        change.set()

    def is_served(self, model: str) -> bool:
        """Whether a replica of it is listed as usable."""
        return model in self._served

    async def until_back(self, model: str, within_s: float) -> bool:
        """Wait for a replica of a model that the router has none of.

        Returns:
            Whether to ask the router again. If not, waiting is no use.
        """
        if within_s <= 0 or self._num_waiting >= _MAX_WAITING:
            return False
        self._num_waiting += 1
        try:
            async with awake_timeout(within_s):
                return await self._until_back(model)
        except TimeoutError:
            return False
        finally:
            self._num_waiting -= 1

    async def _until_back(self, model: str) -> bool:
        if model in self._served:
            await asyncio.sleep(_LAG_S)
        if model in self._served:
            return _age_s(self._back_since_s.get(model)) < _SETTLING_S
        if _age_s(self._gone_since_s.get(model)) > _LATELY_S:
            return False
        while model not in self._served:
            await self._change.wait()
        return True


def _age_s(since_s: float | None) -> float:
    return math.inf if since_s is None else time.monotonic() - since_s
