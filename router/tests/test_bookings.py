"""Routers that tell one another what they have under way; lost and late messages."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_common.kv_index import ReplicaKey
from headrace_contracts.router.v1.bookings_pb2 import BookingNews
from headrace_router import bookings
from headrace_router.bookings import SILENCE_S, BookingExchange
from headrace_router.breaker import CLOSED, HALF_OPEN, OPEN, Breakers
from headrace_router.in_flight import InFlightBlocks
from headrace_router.load_guard import Load, LoadBook, LoadGuard
from headrace_testing.clock import FakeClock

W1, W2 = ReplicaKey("w1", 1), ReplicaKey("w2", 1)
NOTHING = Load(0, 0, 0, 0)


class Router:
    """A load book and its exchange."""

    def __init__(self, name: str, clock: FakeClock) -> None:
        self.name, self.clock, self.loads = name, clock, LoadBook(InFlightBlocks())
        self.wakes = 0
        self.exchange = BookingExchange(name, self.loads, clock, self._woken)

    def _woken(self) -> None:
        self.wakes += 1

    def book(self, replica: ReplicaKey = W1, chain: tuple[int, ...] = ()) -> LoadGuard:
        return self.loads.book(
            replica, chain, uncached_tokens=100, prompt_tokens=300, now_s=self.clock.now_s()
        )

    def hear(self, other: "Router") -> None:
        news = other.exchange.take_news()
        if news is not None:
            self.exchange.receive(BookingNews.FromString(news.SerializeToString()))


@pytest.fixture
def routers(clock: FakeClock) -> tuple[Router, Router]:
    return Router("a", clock), Router("b", clock)


def test_a_peers_booking_counts_until_it_ends(routers: tuple[Router, Router]) -> None:
    """Backlog until the first token, tokens until the end; its blocks count as on their way."""
    a, b = routers
    guard = a.book(chain=(1, 2, 3))
    assert a.wakes == 1
    b.hear(a)
    assert b.loads.load(W1, None) == Load(100, 300, 1, 300)
    assert b.loads.in_flight.depths((1, 2, 9)) == {W1: 2}
    assert (a.loads.num_requests(), b.loads.num_requests()) == (1, 0)
    guard.first_token(0.0)
    b.hear(a)
    assert b.loads.load(W1, None) == Load(0, 300, 1, 300)
    guard.release()
    b.hear(a)
    assert b.loads.load(W1, None) == NOTHING


def test_a_booking_that_is_over_before_it_was_told_leaves_nothing(
    routers: tuple[Router, Router],
) -> None:
    """Booked, started and released in one message."""
    a, b = routers
    guard = a.book()
    guard.first_token(0.0)
    guard.release()
    b.hear(a)
    assert b.loads.load(W1, None) == NOTHING
    assert b.exchange.num_peers() == 1


def test_news_are_told_once_and_not_to_oneself(routers: tuple[Router, Router]) -> None:
    """A channel brings back what one sends; it is not counted twice."""
    a, b = routers
    a.book()
    news = a.exchange.take_news()
    assert news is not None
    a.exchange.receive(news)
    assert a.loads.load(W1, None) == Load(100, 300, 1, 300)
    assert a.exchange.take_news() is None
    b.exchange.receive(news)
    assert b.exchange.take_news() is None


def test_a_silent_router_is_gone_with_all_it_had(
    routers: tuple[Router, Router], clock: FakeClock
) -> None:
    """A killed router gives nothing back itself; its peers do after two seconds."""
    a, b = routers
    a.book()
    a.book(W2)
    b.hear(a)
    clock.advance(SILENCE_S)
    b.exchange.expire()
    assert b.exchange.num_peer_bookings() == 2
    clock.advance(0.1)
    b.exchange.expire()
    assert (b.exchange.num_peers(), b.exchange.num_peer_bookings()) == (0, 0)
    assert b.loads.load(W1, None) == b.loads.load(W2, None) == NOTHING


def test_what_peers_can_make_one_hold_is_bounded(
    routers: tuple[Router, Router], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer gone mad costs a bounded amount of memory."""
    a, b = routers
    monkeypatch.setattr(bookings, "MAX_BOOKINGS_PER_PEER", 3)
    monkeypatch.setattr(bookings, "MAX_PEERS", 1)
    for _ in range(5):
        a.book()
    b.hear(a)
    assert b.exchange.num_peer_bookings() == 3
    other = Router("c", a.clock)
    other.book()
    b.hear(other)
    assert b.exchange.num_peers() == 1


def test_too_much_news_waits_for_the_next_whole_message(
    routers: tuple[Router, Router], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While Redis is away news does not pile up; afterwards nothing is missing."""
    a, b = routers
    monkeypatch.setattr(bookings, "_MAX_PENDING", 10)
    for _ in range(100):
        a.book()
    b.exchange.receive(a.exchange.whole())
    assert b.loads.load(W1, None).num_requests == 100


def test_a_busy_router_tells_all_less_often_and_is_heard_all_the_same(
    routers: tuple[Router, Router], clock: FakeClock
) -> None:
    """Whole messages grow with what is under way; between them an empty one shows life."""
    a, b = routers
    assert a.exchange.whole_every_s() == bookings.WHOLE_EVERY_S
    for _ in range(1000):
        a.book()
    assert a.exchange.whole_every_s() == 3 * bookings.WHOLE_EVERY_S
    for _ in range(4):
        b.exchange.receive(a.exchange.heartbeat())
        clock.advance(SILENCE_S * 0.9)
        b.exchange.expire()
    assert b.exchange.num_peer_bookings() == 1000


STEPS = ["book w1", "book w2", "start", "grow", "release", "tell", "lose"]


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9)), max_size=60))
def test_lost_messages_are_mended_by_a_whole_one(steps: list[tuple[str, int]]) -> None:
    """Whatever was lost, after a whole message both routers count the same."""
    clock = FakeClock()
    a, b = Router("a", clock), Router("b", clock)
    live: list[LoadGuard] = []
    acts: dict[str, Callable[[LoadGuard], object]] = {
        "start": lambda guard: guard.first_token(clock.now_s()),
        "grow": lambda guard: guard.add_output(7),
        "release": LoadGuard.release,
    }
    for kind, pick in steps:
        if kind.startswith("book"):
            live.append(a.book(W1 if kind.endswith("1") else W2, (pick, pick + 1)))
        elif kind == "tell":
            b.hear(a)
        elif kind == "lose":
            a.exchange.take_news()
        elif live:
            acts[kind](live[pick % len(live)])
            live = [guard for guard in live if not guard.is_released]
    b.exchange.receive(a.exchange.whole())
    for replica in (W1, W2):
        assert b.loads.load(replica, None) == a.loads.load(replica, None)
    for guard in live:
        guard.release()
    b.exchange.receive(a.exchange.whole())
    assert b.exchange.num_peer_bookings() == 0
    assert b.loads.in_flight.num_entries() == 0


def test_a_replica_that_fails_is_found_by_all_routers_together(clock: FakeClock) -> None:
    """Two failures here and one there open both breakers; one probe, of either, closes both."""
    states: dict[str, list[str]] = {"a": [], "b": []}
    routers = [Router(name, clock) for name in states]
    breakers = [Breakers(clock, on_change=states[one.name].append) for one in routers]
    for router, own in zip(routers, breakers, strict=True):
        router.loads.listen(own, to_peers=True)
        router.exchange.watch_failures(own.failed)
    a, b = routers

    def exchange() -> None:
        b.hear(a)
        a.hear(b)

    for number in (0, 1, 0):
        guard = routers[number].book()
        exchange()
        breakers[number].failed(guard)
        routers[number].exchange.failed(guard)
        guard.release()
        exchange()
    assert states == {"a": [OPEN], "b": [OPEN]}
    assert all(one.broken(clock.now_s()) == {W1} for one in breakers)

    clock.advance(1.5)
    assert not any(one.broken(clock.now_s()) for one in breakers)
    probe = b.book()
    exchange()
    assert all(one.broken(clock.now_s()) == {W1} for one in breakers)
    probe.first_token(clock.now_s())
    exchange()
    assert states == {"a": [OPEN, HALF_OPEN, CLOSED], "b": [OPEN, HALF_OPEN, CLOSED]}


def test_an_end_without_a_verdict_at_a_peer_makes_place_for_another_probe(
    clock: FakeClock, routers: tuple[Router, Router]
) -> None:
    """Also when that peer is never heard again."""
    a, b = routers
    breakers = Breakers(clock)
    b.loads.listen(breakers, to_peers=True)
    for _ in range(3):
        breakers.failed(b.book())
    clock.advance(1.5)
    a.book()
    b.hear(a)
    assert breakers.broken(clock.now_s()) == {W1}
    clock.advance(SILENCE_S + 0.1)
    b.exchange.expire()
    assert not breakers.broken(clock.now_s())
