"""Tells every watcher what has changed, at once for changes made here, within a beat for others'.

The truth is the revision in the database: the feed asks for it each beat and after each change, so
several billing processes over one database announce one another's changes, and a revision never
goes back, restarts included.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

from headrace_billing.revisions import changes_since
from headrace_billing.store import Database
from headrace_common.errors import Unavailable
from headrace_contracts.billing.v1.billing_pb2 import Change

# The contract promises a beat every second; half of it leaves room for a busy loop.
BEAT_S = 0.5
# A watcher that does not read is told "all" rather than kept a list for.
MAX_PENDING_KEYS = 10_000


class Watcher:
    """One reader of the feed. What it has not read yet is merged into one change."""

    def __init__(self, revision: int) -> None:
        self._pending = Change(revision=revision)
        self._filled = asyncio.Event()
        # A first beat goes out at once: it tells where the watcher starts.
        self._filled.set()
        self._is_ended = False

    async def next(self) -> Change:
        """Wait for the next change or beat.

        Raises:
            Unavailable: the feed cannot tell any more; the reader must take nothing for fresh.
        """
        await self._filled.wait()
        if self._is_ended:
            raise Unavailable("Changes cannot be told now.", retry_after_s=1.0)
        self._filled.clear()
        change, self._pending = self._pending, Change()
        return change

    def add(self, change: Change) -> None:
        """Merge a change into what waits."""
        pending = self._pending
        pending.revision = change.revision
        pending.prices |= change.prices
        pending.all_keys |= change.all_keys
        pending.key_ids.extend(change.key_ids)
        if len(pending.key_ids) > MAX_PENDING_KEYS:
            pending.ClearField("key_ids")
            pending.all_keys = True
        self._filled.set()

    def end(self) -> None:
        """Let the reader fail."""
        self._is_ended = True
        self._filled.set()


class ChangeFeed:
    """Reads revisions from the database and hands changes to the watchers."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._revision: int | None = None
        self._watchers: set[Watcher] = set()
        self._nudged = asyncio.Event()

    def nudge(self) -> None:
        """Look now: something was changed."""
        self._nudged.set()

    async def _poll(self, since: int) -> None:
        """Ask the database once and tell the watchers; without a change that is a beat."""
        found = await self._database.read(lambda it: changes_since(it, since))
        self._revision = found.revision
        change = Change(revision=found.revision, prices=found.prices, key_ids=found.key_ids)
        for watcher in self._watchers:
            watcher.add(change)

    async def run(self, on_alive: Callable[[], Awaitable[None]]) -> None:
        """Look each beat and at each nudge; when the database is gone, end all watchers.

        Args:
            on_alive: called once, when watchers may come.

        Raises:
            Unavailable: the database cannot answer.
        """
        try:
            start = await self._database.read(lambda it: changes_since(it, -1))
            self._revision = start.revision
            await on_alive()
            while True:
                self._nudged.clear()
                await self._poll(self._revision)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_S):
                        await self._nudged.wait()
        finally:
            self._revision = None
            for watcher in self._watchers:
                watcher.end()

    @contextlib.contextmanager
    def watch(self) -> Iterator[Watcher]:
        """Register a watcher for the time of the block.

        Raises:
            Unavailable: the feed does not run.
        """
        if self._revision is None:
            raise Unavailable("Billing is not ready yet.", retry_after_s=1.0)
        watcher = Watcher(self._revision)
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
