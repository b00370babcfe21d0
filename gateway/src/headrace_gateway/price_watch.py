"""Keeps the price table current: fetched at start, again at each change, and every few minutes."""

from __future__ import annotations

import asyncio
from typing import Protocol

from headrace_contracts.billing.v1.billing_pb2 import Change, PriceTable
from headrace_gateway.pricing import PriceBook

# A change that was missed while billing was away is found so late at most.
_REFRESH_S = 300.0


class PriceSource(Protocol):
    """What billing offers here."""

    async def fetch_prices(self) -> PriceTable:
        """Return all prices."""
        ...


class PriceWatch:
    """Fetches prices into a book.

    Args:
        source: billing.
        book: is loaded here, read elsewhere.
    """

    def __init__(self, source: PriceSource, book: PriceBook) -> None:
        self._source, self.book = source, book
        self._changed = asyncio.Event()

    def on_change(self, change: Change | None) -> None:
        """Fetch again if prices changed; None = some changes may have been missed."""
        if change is None or change.prices:
            self._changed.set()

    async def keep(self) -> None:
        """Fetch now and whenever needed; run under `supervise`."""
        while True:
            self._changed.clear()
            self.book.load(await self._source.fetch_prices())
            try:
                async with asyncio.timeout(_REFRESH_S):
                    await self._changed.wait()
            except TimeoutError:
                continue
