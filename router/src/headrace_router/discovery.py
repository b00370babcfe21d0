"""Which workers there are: a fixed list, or every address that a name resolves to."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial

from headrace_common.clock import Clock
from headrace_common.lifecycle import cancel_and_wait, supervise
from headrace_common.settings import join_address, split_address
from headrace_router.replicas import ReplicaTable
from headrace_router.settings import DNS_PREFIX

_log = logging.getLogger(__name__)
# A restarted worker is found again within this time.
_MAX_RETRY_S = 1.0
# Longer than weights take to be fetched and loaded; a mistyped model is waited for no longer.
MAX_START_S = 1800.0
Resolve = Callable[[str, int], Awaitable[set[str]]]


class Discovery:
    """Keeps one supervised watch per worker address.

    Args:
        entries: ``host:port``, or ``dns:host:port`` for all addresses of a name.
        table: told of addresses that come and vanish.
        follow: follows one address until its connection ends.
        resolve: addresses of a host name, as ``host:port``.
        resolve_interval_s: time between two look-ups.
        on_failure: called whenever a connection ended or could not be made.
        clock: says how long a worker takes to say what it serves.
    """

    def __init__(
        self,
        entries: list[str],
        table: ReplicaTable,
        follow: Callable[[str], Awaitable[None]],
        *,
        resolve: Resolve,
        resolve_interval_s: float,
        on_failure: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._fixed = {entry for entry in entries if not entry.startswith(DNS_PREFIX)}
        names = [e.removeprefix(DNS_PREFIX) for e in entries if e.startswith(DNS_PREFIX)]
        self._names = [split_address(name) for name in names]
        self._table, self._follow, self._resolve = table, follow, resolve
        self._resolve_interval_s, self._on_failure = resolve_interval_s, on_failure
        self._clock = clock
        self._watches: dict[str, asyncio.Task[None]] = {}
        # Addresses at which no worker was found, once at least.
        self._missed: set[str] = set()
        self._has_looked_up = not self._names
        # Set once each worker has reported or was not found: before, who is there is open.
        self.looked = asyncio.Event()
        table.on_change(self._note_looked)
        # Since when each worker is waited for that has yet to say what it serves.
        self._waited_since_s: dict[str, float] = {}

    async def run(self) -> None:
        """Watch until cancelled, then stop every watch."""
        try:
            self._start(self._fixed)
            while True:
                if self._names:
                    await self._look_up()
                    self._has_looked_up = True
                self._note_looked()
                self._give_up_late()
                await asyncio.sleep(self._resolve_interval_s)
        finally:
            await cancel_and_wait(*self._watches.values())
            self._watches.clear()

    def _note_looked(self) -> None:
        is_complete = self._has_looked_up and self._fixed <= self._watches.keys()
        if is_complete and not self.looked.is_set() and all(map(self._is_clear, self._watches)):
            self.looked.set()

    def _is_clear(self, address: str) -> bool:
        replica = self._table.get(address)
        is_heard = replica is not None and replica.reported_at_s is not None
        return is_heard or address in self._missed

    def _miss(self, address: str) -> None:
        self._missed.add(address)
        self._on_failure()
        self._note_looked()

    async def _look_up(self) -> None:
        wanted = set(self._fixed)
        for host, port in self._names:
            try:
                wanted |= await self._resolve(host, port)
            except OSError as error:
                # No answer says nothing about the workers: keep those that are known.
                _log.warning("%s cannot be resolved: %s", host, error)
                return
        self._start(wanted)
        for address in set(self._watches) - wanted:
            replica = self._table.get(address)
            # A name may vanish while its worker still drains.
            if replica is None or not replica.is_reachable:
                await cancel_and_wait(self._watches.pop(address))
                self._missed.discard(address)
                self._table.remove(address)

    def _give_up_late(self) -> None:
        now_s, known = self._clock.now_s(), self._waited_since_s
        self._waited_since_s = {it: known.get(it, now_s) for it in self._table.undescribed()}
        for address, since_s in self._waited_since_s.items():
            if since_s <= now_s - MAX_START_S and self._table.give_up(address):
                _log.warning(
                    "worker %s has not said in %.0f s what it serves: its models are unknown",
                    address,
                    now_s - since_s,
                )

    def _start(self, addresses: set[str]) -> None:
        for address in sorted(addresses - set(self._watches)):
            self._table.expect(address)
            self._watches[address] = asyncio.create_task(
                supervise(
                    f"watch of worker {address}",
                    partial(self._follow, address),
                    max_delay_s=_MAX_RETRY_S,
                    on_failure=partial(self._miss, address),
                )
            )


async def resolve_host(host: str, port: int) -> set[str]:
    """Resolve a name to all its addresses.

    Raises:
        OSError: there is no such name, or no answer.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return {join_address(str(address[0]), port) for *_, address in found}
