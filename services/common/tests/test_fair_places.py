"""Places that tenants share: nobody's queue is everybody's."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Hashable

import pytest

from headrace_common.fair_places import FairPlaces, FairThreads, NoPlaceError
from headrace_testing.waiting import eventually


class Line:
    """Takes places and notes in which order they were given."""

    def __init__(self, places: FairPlaces) -> None:
        self.places = places
        self.given: list[Hashable] = []
        self._num_back = 0

    async def take(self, whose: Hashable, size: float = 1.0) -> asyncio.Task[None]:
        """Begin to wait for a place, or to use one."""

        async def wait() -> None:
            await self.places.take(whose, size)
            self.given.append(whose)

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        return task

    async def next(self) -> Hashable:
        """Give the oldest place back and return who got it."""
        num_given = len(self.given)
        self.places.give_back(self.given[self._num_back])
        self._num_back += 1
        await asyncio.sleep(0)
        assert len(self.given) == num_given + 1
        return self.given[-1]


async def test_a_newcomer_comes_before_the_rest_of_a_flood() -> None:
    """However many waited before it."""
    line = Line(FairPlaces(2))
    for _ in range(20):
        await line.take("flood")
    await line.take("one")
    assert await line.next() == "one"
    assert await line.next() == "flood"


async def test_those_who_flood_take_turns() -> None:
    """One after the other, not as they came."""
    line = Line(FairPlaces(1))
    for whose in "aaaabbbbcc":
        await line.take(whose)
    assert [await line.next() for _ in range(9)] == list("bcabcabab")


async def test_shares_are_of_work_not_of_pieces() -> None:
    """Who sends pieces of ten has one served for ten of another's."""
    line = Line(FairPlaces(1))
    for _ in range(100):
        await line.take("long", 10.0)
        await line.take("short", 1.0)
    for _ in range(55):
        await line.next()
    assert Counter(line.given) == {"short": 51, "long": 5}


async def test_a_pause_saves_nothing_up() -> None:
    """Who comes back late is next once, not as often as it was away."""
    line = Line(FairPlaces(1))
    for _ in range(20):
        await line.take("busy")
    for _ in range(10):
        await line.next()
    for _ in range(5):
        await line.take("late")
    assert [await line.next() for _ in range(5)] == ["late", "busy", "late", "busy", "late"]


async def test_a_full_queue_takes_from_who_has_most() -> None:
    """Its newest; the others are untouched, and who has most is refused at once."""
    line = Line(FairPlaces(1, max_waiting=4))
    flood = [await line.take("flood") for _ in range(5)]
    with pytest.raises(NoPlaceError):
        await line.places.take("flood")
    one = await line.take("one")
    with pytest.raises(NoPlaceError):
        await flood[4]
    two = await line.take("one")
    with pytest.raises(NoPlaceError):
        await flood[3]
    # Two and two: to swap one for another helps nobody.
    with pytest.raises(NoPlaceError):
        await line.places.take("one")
    for _ in range(4):
        await line.next()
    await asyncio.gather(*flood[:3], one, two)


async def test_what_was_begun_is_ended_first() -> None:
    """Before the same tenant's new work, not before another's turn, and not refused."""
    places, given = FairPlaces(1, 2), []

    async def wait(whose: str, name: str, *, goes_on: bool = False) -> None:
        await places.take(whose, goes_on=goes_on)
        given.append(name)

    await places.take("a")
    waiting = [asyncio.create_task(wait("a", "new")), asyncio.create_task(wait("b", "other"))]
    await asyncio.sleep(0)
    waiting.append(asyncio.create_task(wait("a", "begun", goes_on=True)))
    await asyncio.sleep(0)
    for whose in ("a", "b", "a", "a"):
        places.give_back(whose)
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    assert given == ["other", "begun", "new"]


async def test_who_leaves_makes_room() -> None:
    """While waiting, and in the very turn in which a place is given."""
    line = Line(FairPlaces(1, max_waiting=1))
    await line.take("a")
    gone = await line.take("b")
    gone.cancel()
    await asyncio.sleep(0)
    overtaken = await line.take("b")
    overtaken.cancel()
    line.places.give_back("a")
    await asyncio.gather(gone, overtaken, return_exceptions=True)
    late = await line.take("c")
    assert late.done()
    given = await line.take("d")
    line.places.give_back("c")
    given.cancel()
    await asyncio.gather(given, return_exceptions=True)
    assert (await line.take("e")).done()


async def test_a_place_is_left_to_others() -> None:
    """Where what runs may run for long; others find it free."""
    line = Line(FairPlaces(2, most_each=1))
    await line.take("flood")
    waiting = await line.take("flood")
    assert not waiting.done()
    assert (await line.take("one")).done()
    line.places.give_back("one")
    assert not waiting.done()
    assert await line.next() == "flood"


async def test_no_place_is_lost_or_made() -> None:
    """Whatever comes and leaves in whatever order: never too many, and in the end none."""
    rng = random.Random(7)
    here: list[int] = []
    places = FairPlaces(3, 5, 2, here.append)
    running: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()

    async def use(whose: str) -> None:
        try:
            await places.take(whose, rng.random() + 0.1)
        except NoPlaceError:
            outcomes["refused"] += 1
            return
        running[whose] += 1
        assert running.total() <= 3 >= running[whose] + 1
        try:
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
        finally:
            running[whose] -= 1
            outcomes["served"] += 1
            places.give_back(whose)

    tasks: list[asyncio.Task[None]] = []
    for _ in range(3000):
        tasks.append(asyncio.create_task(use(rng.choice("aaaaabbc"))))
        if rng.random() < 0.3:
            rng.choice(tasks[-8:]).cancel()
        if rng.random() < 0.5:
            await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert outcomes["served"] > 500 < 500 + outcomes["refused"]
    assert max(here) <= 8
    assert here[-1] == 0


async def test_threads_are_given_by_turns() -> None:
    """And kept by work whose caller has left, until it ends."""
    threads = FairThreads(1, "test")
    release, begun = threading.Event(), []
    leaving = asyncio.create_task(threads.run("flood", 1.0, release.wait))
    await asyncio.sleep(0)
    flood = [
        asyncio.create_task(threads.run("flood", 1.0, lambda: begun.append("flood")))
        for _ in range(3)
    ]
    await asyncio.sleep(0)
    one = asyncio.create_task(threads.run("one", 1.0, lambda: begun.append("one")))
    leaving.cancel()
    await asyncio.sleep(0)
    assert begun == []
    release.set()
    await asyncio.gather(one, *flood)
    assert begun == ["one", "flood", "flood", "flood"]
    threads.close()


async def test_closed_threads_cancel_who_waits() -> None:
    """Nobody waits for ever."""
    threads = FairThreads(1, "test")
    release = threading.Event()
    running = asyncio.create_task(threads.run("t", 1.0, release.wait))
    waiting = asyncio.create_task(threads.run("t", 1.0, release.wait))
    await asyncio.sleep(0)
    release.set()
    threads.close()
    assert await running
    await eventually(waiting.cancelled)
