"""Ends credits that have an end, in the background."""

from __future__ import annotations

import asyncio

from headrace_billing.audit import Stamp
from headrace_billing.credit_store import expire_credits
from headrace_billing.store import Database
from headrace_common.clock import Clock

_INTERVAL_S = 30.0


class CreditExpiry:
    """Takes back what is left of credits that have ended. Any number of processes may run it.

    Args:
        database: where the books are.
        clock: time.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    async def run(self) -> None:
        """Look for ever.

        Raises:
            Unavailable: the database cannot answer.
        """
        while True:
            while await self.expire():
                pass
            await asyncio.sleep(_INTERVAL_S)

    async def expire(self) -> int:
        """End what is due; return how many credits that were.

        Raises:
            Unavailable: the database cannot answer.
        """
        by = Stamp(int(self._clock.unix_s()))
        return await self._database.write(lambda it: expire_credits(it, by))
