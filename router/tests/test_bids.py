"""Routers that bid for an opening: one of them fills it, whatever gets lost."""

from collections.abc import Callable
from random import Random

import pytest
from prometheus_client import CollectorRegistry

from headrace_common.kv_index import ReplicaKey
from headrace_contracts.router.v1.bookings_pb2 import BookingNews
from headrace_contracts.router.v1.router_pb2 import PickProgress
from headrace_router import bids
from headrace_router.bids import BID_TTL_S, CONTEST_S, SETTLE_S, Bid, Bids
from headrace_router.bookings import BookingExchange
from headrace_router.desk import Outcome, PickDesk, Ticket
from headrace_router.metrics import RouterMetrics
from headrace_router.policy_file import PolicyFile
from headrace_testing.clock import FakeClock

W1, W2 = ReplicaKey("w1", 1), ReplicaKey("w2", 1)
SOON, LATER = Bid(0, 0.5), Bid(0, 2.0)
LONG = 1000


class Pair:
    """Two routers' bids; what one tells, the other hears at once unless `is_cut`."""

    def __init__(self, clock: FakeClock) -> None:
        self.is_cut = False
        self.a = Bids("a", clock, lambda: True, self._teller("a"))
        self.b = Bids("b", clock, lambda: True, self._teller("b"))

    def _teller(self, name: str) -> Callable[[ReplicaKey, Bid | None], None]:
        def tell(replica: ReplicaKey, bid: Bid | None) -> None:
            if not self.is_cut:
                (self.b if name == "a" else self.a).hear(name, replica, bid)

        return tell


@pytest.fixture
def pair(clock: FakeClock) -> Pair:
    return Pair(clock)


def test_without_peers_every_bid_wins_at_once() -> None:
    """One router loses no time."""
    alone = Bids("a", FakeClock(), lambda: False, lambda *_: None)
    assert alone.wins(W1, "r", LATER)
    assert alone.next_s() is None
    assert not alone.is_contested(is_queueing=True)


def test_the_more_urgent_bid_wins_once_all_have_come(pair: Pair, clock: FakeClock) -> None:
    """Not before: a better one may be on its way."""
    assert not pair.a.wins(W1, "ra", LATER)
    assert pair.a.next_s() == SETTLE_S
    assert not pair.b.wins(W1, "rb", SOON)
    clock.advance(SETTLE_S)
    assert not pair.a.wins(W1, "ra", LATER)
    assert pair.b.wins(W1, "rb", SOON)
    pair.b.withdraw("rb")
    assert pair.a.wins(W1, "ra", LATER)


def test_a_higher_class_wins_and_equals_have_one_winner(pair: Pair, clock: FakeClock) -> None:
    """All routers break a tie in the same way."""
    for replica, bid in ((W1, Bid(-1, 9.0)), (W2, LATER)):
        pair.a.wins(replica, "ra", LATER)
        pair.b.wins(replica, "rb", bid)
    clock.advance(SETTLE_S)
    assert not pair.a.wins(W1, "ra", LATER)
    assert pair.b.wins(W1, "rb", Bid(-1, 9.0))
    assert pair.a.wins(W2, "ra", LATER)
    assert not pair.b.wins(W2, "rb", LATER)


def test_another_request_is_another_bid(pair: Pair, clock: FakeClock) -> None:
    """The others have not heard of it yet."""
    pair.a.wins(W1, "old", LATER)
    clock.advance(SETTLE_S)
    assert not pair.a.wins(W1, "new", SOON)
    clock.advance(SETTLE_S)
    assert pair.a.wins(W1, "new", SOON)


def test_a_vanished_router_holds_up_an_opening_for_the_life_of_a_bid(
    pair: Pair, clock: FakeClock
) -> None:
    """Not for the two seconds after which it is forgotten."""
    pair.b.wins(W1, "rb", SOON)
    waited_s = 0.0
    while not pair.a.wins(W1, "ra", LATER):
        clock.advance(SETTLE_S)
        waited_s += SETTLE_S
    assert BID_TTL_S <= waited_s <= BID_TTL_S + 2 * SETTLE_S


def test_a_bid_that_stands_is_repeated(pair: Pair, clock: FakeClock) -> None:
    """Or the others would take it for void."""
    for _ in range(20):
        clock.advance(BID_TTL_S / 4)
        pair.b.wins(W1, "rb", SOON)
        assert not pair.a.wins(W1, "ra", LATER)


def test_newcomers_bid_while_bids_are_told(pair: Pair, clock: FakeClock) -> None:
    """Elsewhere somebody may wait for what seems free here."""
    assert not pair.b.is_contested(is_queueing=False)
    assert pair.b.is_contested(is_queueing=True)
    pair.a.wins(W1, "ra", LATER)
    assert pair.b.is_contested(is_queueing=False)
    clock.advance(CONTEST_S + 0.1)
    assert not pair.b.is_contested(is_queueing=False)


def test_what_peers_can_make_one_hold_is_bounded(
    pair: Pair, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer gone mad costs a bounded amount of memory; bids that stand are heard again."""
    monkeypatch.setattr(bids, "MAX_REPLICAS", 3)
    for number in range(10):
        pair.b.hear("a", ReplicaKey("w", number), SOON)
    assert len(pair.b._heard) <= 3
    assert not pair.b.wins(ReplicaKey("w", 9), "rb", LATER)
    clock.advance(SETTLE_S)
    assert not pair.b.wins(ReplicaKey("w", 9), "rb", LATER)


class Router:
    """A desk on a fleet of its own view, and its exchange with others."""

    def __init__(self, name: str, fleet, ask) -> None:
        self.fleet, self._ask = fleet, ask
        self.key = fleet.add("w1")
        self.desk = PickDesk(
            fleet.pipeline,
            fleet.loads,
            fleet.predictor,
            fleet.decode,
            PolicyFile(version=1),
            fleet.clock,
            Random(1),
            RouterMetrics(CollectorRegistry()),
        )
        self.exchange = BookingExchange(name, fleet.loads, fleet.clock, lambda: None)
        self.desk.bid(self.exchange.bids)
        self.gone: list[Outcome] = []

    def submit(self, tokens: int) -> Ticket:
        return self.desk.submit(self._ask(tokens), None, self.gone.append)


def exchange(*routers: Router) -> None:
    """Carry all news, as over the wire."""
    told = [one.exchange.heartbeat().SerializeToString() for one in routers]
    for one in routers:
        for news in told:
            one.exchange.receive(BookingNews.FromString(news))


def test_of_two_desks_one_fills_an_opening_with_the_shorter_request(make_fleet, ask, clock) -> None:
    """Both hold a request for one replica; both see it open; one goes, then the other."""
    a, b = Router("a", make_fleet(clock), ask), Router("b", make_fleet(clock), ask)
    exchange(a, b)
    first = a.submit(LONG)
    exchange(a, b)
    waiting = [a.submit(5 * LONG), b.submit(2 * LONG)]
    first.progress(PickProgress(first_token=True, ttft_s=1.0))
    exchange(a, b)
    for router in (a, b):
        router.desk.release_all()
        assert router.desk.next_look_s() == SETTLE_S
    exchange(a, b)
    clock.advance(SETTLE_S)
    for router in (a, b):
        router.desk.release_all()
    assert (len(a.gone), len(b.gone)) == (1, 1)
    exchange(a, b)
    a.desk.release_all()
    assert len(a.gone) == 1
    waiting[1].progress(PickProgress(first_token=True, ttft_s=2.0))
    exchange(a, b)
    for _ in range(2):
        a.desk.release_all()
        clock.advance(SETTLE_S)
    a.desk.release_all()
    assert len(a.gone) == 2
    for ticket in (first, *waiting):
        ticket.close()


def test_a_newcomer_goes_at_once_where_nothing_runs(make_fleet, ask, clock) -> None:
    """Nobody waits for such a replica; a contested busy one is bid for."""
    a, b = Router("a", make_fleet(clock), ask), Router("b", make_fleet(clock), ask)
    exchange(a, b)
    b.exchange.bids.wins(W2, "somebody", LATER)
    exchange(a, b)
    first = a.submit(LONG)
    assert len(a.gone) == 1
    first.progress(PickProgress(first_token=True, ttft_s=1.0))
    second = a.submit(LONG)
    assert len(a.gone) == 1
    # It gathers, then bids.
    for _ in range(2):
        a.desk.release_all()
        clock.advance(SETTLE_S)
        assert len(a.gone) == 1
    a.desk.release_all()
    assert len(a.gone) == 2
    for ticket in (first, second):
        ticket.close()
