"""Breakers: when a replica is left alone, and how it comes back."""

from __future__ import annotations

from headrace_common.kv_index import ReplicaKey
from headrace_router.breaker import BreakerLimits, Breakers
from headrace_router.filters.broken import BROKEN
from headrace_router.gathering import Gatherer
from headrace_router.in_flight import InFlightBlocks
from headrace_router.load_guard import LoadBook, LoadGuard
from headrace_testing.clock import FakeClock

KEY = ReplicaKey("w", 1)


class Scene:
    """One replica's breaker on a clock that moves when told."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock, self.states = clock, list[str]()
        self.breakers = Breakers(clock, BreakerLimits(), self.states.append)
        self.book = LoadBook(InFlightBlocks())
        self.book.listen(self.breakers)

    def send(self) -> LoadGuard:
        return self.book.book(KEY, [], uncached_tokens=1, prompt_tokens=1, now_s=self.clock.now_s())

    def end(self, *outcomes: bool) -> None:
        for is_ok in outcomes:
            guard = self.send()
            if is_ok:
                guard.first_token(self.clock.now_s())
            else:
                self.breakers.failed(guard)
            guard.release()

    @property
    def is_broken(self) -> bool:
        return KEY in self.breakers.broken(self.clock.now_s())


def test_failures_in_a_row_open_it(clock: FakeClock) -> None:
    """Three; a success between them begins the count anew."""
    scene = Scene(clock)
    scene.end(False, False, True, False, False)
    assert not scene.is_broken
    scene.end(False)
    assert scene.is_broken
    assert scene.breakers.num_open == 1


def test_half_of_the_last_ten_open_it(clock: FakeClock) -> None:
    """Though never many in a row."""
    scene = Scene(clock)
    scene.end(*[False, True] * 4, True)
    assert not scene.is_broken
    scene.end(False)
    assert scene.is_broken


def test_one_probe_decides(clock: FakeClock) -> None:
    """It alone goes out; its failure doubles the time, its first token closes the breaker."""
    scene = Scene(clock)
    scene.end(False, False, False)
    late = scene.send()
    clock.advance(1.0)
    assert not scene.is_broken
    late.release()
    probe = scene.send()
    assert scene.is_broken
    scene.breakers.failed(probe)
    probe.release()
    clock.advance(1.9)
    assert scene.is_broken
    clock.advance(0.2)
    left = scene.send()
    left.release()
    assert not scene.is_broken, "a probe without a verdict makes place for another"
    scene.end(True)
    assert not scene.is_broken
    assert scene.breakers.num_open == 0
    assert scene.states == ["open", "half_open", "open", "half_open", "half_open", "closed"]


def test_a_replica_that_is_gone_is_forgotten(clock: FakeClock) -> None:
    """So that no breaker outlives its replica."""
    scene = Scene(clock)
    scene.end(False, False, False)
    scene.breakers.keep_only([])
    assert scene.breakers.num_open == 0
    assert not scene.is_broken


def test_a_broken_replica_is_filtered_by_name(make_fleet: type, clock: FakeClock) -> None:
    """Explanations say why it was not considered; after a booking the look is fresh."""
    fleet = make_fleet(clock)
    bad, good = fleet.add("bad"), fleet.add("good")
    breakers = Breakers(clock)
    fleet.loads.listen(breakers)
    gatherer = Gatherer(fleet.table, fleet.loads, fleet.predictor, fleet.decode, breakers)

    def send() -> LoadGuard:
        guard: LoadGuard = fleet.loads.book(
            bad, [], uncached_tokens=1, prompt_tokens=1, now_s=clock.now_s()
        )
        return guard

    for _ in range(3):
        guard = send()
        breakers.failed(guard)
        guard.release()
    view = gatherer.view("m", clock.now_s())
    assert {one.replica.key: one.filtered_by for one in view.replicas} == {bad: BROKEN, good: ""}
    clock.advance(1.0)
    fleet.report(bad)
    view = gatherer.view("m", clock.now_s())
    assert not any(one.filtered_by for one in view.replicas if one.replica.key == bad)
    send()
    gatherer.mend(view, bad)
    assert [one.filtered_by for one in view.replicas if one.replica.key == bad] == [BROKEN]
