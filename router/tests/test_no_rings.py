"""What a pick made is freed with it: nothing of it is held in a ring of references.

A ring waits for the garbage collector, which then looks through all that waits at once.
"""

from __future__ import annotations

import gc
from contextlib import AsyncExitStack

from headrace_router.candidate import Query
from headrace_router.dispatcher import PendingPick
from headrace_router.load_guard import LoadGuard
from headrace_testing.router_fleet import HASHES, RouterFleet
from headrace_testing.servers import LocalServer
from headrace_testing.waiting import eventually


def _num_alive() -> int:
    # By type: isinstance asks odd objects of other libraries for their class, and some warn.
    return sum(type(it) in (Query, PendingPick, LoadGuard) for it in gc.get_objects())


async def test_a_pick_leaves_nothing_to_the_collector(own_redis: LocalServer) -> None:
    """Each ends by a cancellation, whose traceback must not keep the frames that it left."""
    async with AsyncExitStack() as stack:
        fleet = RouterFleet(own_redis, stack)
        await fleet.start("a", "b")
        await fleet.pick(HASHES)
        gc.collect()
        before = _num_alive()
        gc.disable()
        try:
            for _ in range(10):
                await fleet.pick(HASHES)
            await eventually(lambda: _num_alive() <= before)
        finally:
            gc.enable()
