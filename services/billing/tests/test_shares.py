"""Several consumers over one database: even shares, and a fence against stale ones."""

import pytest

from headrace_billing.shares import LEASE_S, Shares, StaleShareError
from headrace_billing.store import Database
from headrace_testing.clock import FakeClock

PARTITIONS = [("usage", number) for number in range(12)]


def member(database: Database, name: str, clock: FakeClock) -> Shares:
    return Shares(database, name, clock)


async def settled(*members: Shares) -> list[int]:
    """Let everybody renew until nothing moves; return how many partitions each has."""
    for _ in range(4):
        for it in members:
            await it.renew(PARTITIONS, 5.0)
    return [len(it.epochs) for it in members]


async def test_one_consumer_has_everything(database: Database, clock: FakeClock) -> None:
    """And goes on at once when it starts anew, under new epochs."""
    first = await member(database, "a", clock).take(PARTITIONS)
    assert set(first) == set(PARTITIONS)
    again = await member(database, "a", clock).take(PARTITIONS)
    assert set(again) == set(PARTITIONS)
    assert all(again[it] == first[it] + 1 for it in PARTITIONS)


async def test_members_divide_the_partitions_and_nobody_shares_one(
    database: Database, clock: FakeClock
) -> None:
    """Who comes gets its part, who leaves gives it back."""
    a, b, c = (member(database, name, clock) for name in "abc")
    for it in (a, b, c):
        await it.take(PARTITIONS)
    assert await settled(a, b, c) == [4, 4, 4]
    assert set(a.epochs) | set(b.epochs) | set(c.epochs) == set(PARTITIONS)
    await c.release()
    assert await settled(a, b) == [6, 6]


async def test_a_silent_members_partitions_are_taken_after_its_lease(
    database: Database, clock: FakeClock
) -> None:
    """Not before."""
    a, b = member(database, "a", clock), member(database, "b", clock)
    await a.take(PARTITIONS)
    await b.take(PARTITIONS)
    assert await settled(a, b) == [6, 6]
    clock.advance(LEASE_S - 1)
    await b.renew(PARTITIONS, 0.0)
    assert len(b.epochs) == 6
    clock.advance(2)
    await b.renew(PARTITIONS, 0.0)
    assert len(b.epochs) == 12


async def test_a_stale_consumers_commit_fails(database: Database, clock: FakeClock) -> None:
    """It slept through its lease and wakes up with a batch in its hands."""
    sleeper, heir = member(database, "a", clock), member(database, "b", clock)
    await sleeper.take(PARTITIONS)
    await database.write(lambda it: sleeper.check(it, PARTITIONS[:3]))
    clock.advance(LEASE_S + 1)
    await heir.take(PARTITIONS)
    with pytest.raises(StaleShareError):
        await database.write(lambda it: sleeper.check(it, PARTITIONS[:1]))
    await database.write(lambda it: heir.check(it, PARTITIONS[:1]))
    # Also when the partition went back and forth meanwhile.
    stale = dict(sleeper.epochs)
    await heir.release()
    await sleeper.renew(PARTITIONS, 0.0)
    sleeper.epochs = stale
    with pytest.raises(StaleShareError):
        await database.write(lambda it: sleeper.check(it, PARTITIONS[:1]))


async def test_an_earlier_life_of_the_same_consumer_is_fenced_too(
    database: Database, clock: FakeClock
) -> None:
    """The same name is not the same life."""
    before, after = member(database, "a", clock), member(database, "a", clock)
    await before.take(PARTITIONS)
    await after.take(PARTITIONS)
    with pytest.raises(StaleShareError):
        await database.write(lambda it: before.check(it, PARTITIONS[:1]))


async def test_all_is_caught_up_only_if_everybody_is(database: Database, clock: FakeClock) -> None:
    """The least of all; nothing while a partition is nobody's."""
    a, b = member(database, "a", clock), member(database, "b", clock)
    assert await a.all_caught_up_for_s() == 0
    await a.take(PARTITIONS)
    await b.take(PARTITIONS)
    await settled(a, b)
    assert await a.all_caught_up_for_s() == pytest.approx(5.0, abs=0.01)
    await a.renew(PARTITIONS, 60.0)
    await b.renew(PARTITIONS, 3.0)
    assert await a.all_caught_up_for_s() == pytest.approx(3.0, abs=0.01)
    await b.renew(PARTITIONS, 0.0)
    assert await a.all_caught_up_for_s() == 0
    await b.renew(PARTITIONS, 3.0)
    await b.release()
    assert await a.all_caught_up_for_s() == 0


async def test_partitions_that_are_gone_are_nobodys_share(
    database: Database, clock: FakeClock
) -> None:
    """A log that began anew with fewer is read whole, and its old length holds up no sweep."""
    a = member(database, "a", clock)
    await a.take([*PARTITIONS, ("witness", 0)])
    few = [("usage", 0), ("witness", 0)]
    assert set(await a.take(few)) == set(few)
    await a.renew(few, 5.0)
    assert await a.all_caught_up_for_s() == pytest.approx(5.0, abs=0.1)
    assert set(await a.take([*PARTITIONS, ("witness", 0)])) == {*PARTITIONS, ("witness", 0)}
