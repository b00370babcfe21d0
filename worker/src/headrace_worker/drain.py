"""Leaving: no new work, running streams finish or, when the grace has ended, are told to move."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_common.errors import ReplicaDraining
from headrace_worker.calls import Calls

# Time for the last errors to reach their callers.
_SETTLE_S = 1.0


@dataclass(frozen=True)
class DrainResult:
    """How the streams that ran at the start of a drain ended."""

    num_finished: int
    num_moved: int


class Drain:
    """The drain of one worker.

    ::

        serving --drain()--> draining --all served, or grace over--> drained

    There is no way back.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.is_draining = False

    def check_admits(self) -> None:
        """Refuse new work while draining.

        Raises:
            ReplicaDraining: the caller must pick another replica.
        """
        if self.is_draining:
            raise ReplicaDraining("This worker is leaving and takes no new requests.")

    def begin(self) -> None:
        """Stop admitting. Idempotent."""
        self.is_draining = True

    async def drain(self, grace_s: float) -> DrainResult:
        """Stop admitting, wait for running streams, then move the rest. Idempotent."""
        self.begin()
        num_running = self._calls.num_served
        num_moved = 0
        if not await self._calls.wait_idle(grace_s):
            num_moved = self._calls.fail_all(
                ReplicaDraining("This worker is leaving; resume elsewhere.")
            )
            await self._calls.wait_idle(_SETTLE_S)
        return DrainResult(max(0, num_running - num_moved), num_moved)
