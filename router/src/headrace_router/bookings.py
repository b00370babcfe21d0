"""Pure: what routers tell one another of the requests they have under way, so that they don't herd.

Each router tells what it booked, started and released since its last message, what failed, and
every half second (less often with very many) everything it has under way. A peer's booking becomes
a guard in the own load book. Messages may be lost: the next whole one mends the difference. A
silent router is gone after `SILENCE_S`, and with it all it had booked. So whatever happens to peers
or Redis, what is believed of them is not much older than that. Decisions never wait for any of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace_common.clock import Clock
from headrace_common.kv_index import ReplicaKey, pack_ints, short_ints
from headrace_contracts.router.v1.bookings_pb2 import Booking, BookingNews
from headrace_router.bids import Bid, Bids
from headrace_router.load_guard import LoadBook, LoadGuard

WHOLE_EVERY_S = 0.5
# With more than this under way whole messages come in proportion less often: each takes some
# microseconds a booking to make.
_WHOLE_BOOKINGS = 500
SILENCE_S = 2.0
# Bounds on what peers can make this router hold; beyond them their news is ignored.
MAX_PEERS = 256
MAX_BOOKINGS_PER_PEER = 20_000
# Changes kept for the next message; beyond it the next whole one has to do.
_MAX_PENDING = 20_000


@dataclass(slots=True)
class _Peer:
    """Another router, as far as heard."""

    heard_at_s: float
    guards: dict[int, LoadGuard] = field(default_factory=dict)


class BookingExchange:
    """Collects this router's news and takes in that of its peers. Belongs to one event loop.

    Args:
        router_id: this life of this router.
        loads: listened to, and where peers' bookings are counted.
        clock: time.
        on_news: called when there is something to tell.
    """

    def __init__(
        self, router_id: str, loads: LoadBook, clock: Clock, on_news: Callable[[], None]
    ) -> None:
        self._router_id, self._loads, self._clock = router_id, loads, clock
        self._on_news = on_news
        self._own: dict[LoadGuard, int] = {}
        self._next_id = 1
        self._pending = BookingNews(router_id=router_id)
        self._peers: dict[str, _Peer] = {}
        self._on_peer_failed: Callable[[LoadGuard], None] = lambda _: None
        self.bids = Bids(router_id, clock, lambda: bool(self._peers), self._tell_bid)
        loads.listen(self)

    # What the load book tells.

    def booked(self, guard: LoadGuard, chain: Sequence[int]) -> None:
        """Note a decision for the peers."""
        number = self._own[guard] = self._next_id
        self._next_id += 1
        self._pending.booked.append(_booking(number, guard, chain))
        self._changed()

    def started(self, guard: LoadGuard) -> None:
        """Note a first token."""
        self._pending.started.append(self._own[guard])
        self._changed()

    def released(self, guard: LoadGuard) -> None:
        """Note an end."""
        self._pending.released.append(self._own.pop(guard))
        self._changed()

    def failed(self, guard: LoadGuard) -> None:
        """Note that an own request failed on its replica; it has not ended yet."""
        number = self._own.get(guard)
        if number is not None:
            self._pending.failed.append(number)
            self._changed()

    def watch_failures(self, listener: Callable[[LoadGuard], None]) -> None:
        """Let *listener* hear of each request of a peer that failed on its replica."""
        self._on_peer_failed = listener

    # What goes out.

    def take_news(self) -> BookingNews | None:
        """Return what is new since the last call, or None."""
        news, self._pending = self._pending, BookingNews(router_id=self._router_id)
        return news if _num_changes(news) else None

    def whole(self) -> BookingNews:
        """Return everything under way; what is pending is part of it."""
        self._pending = BookingNews(router_id=self._router_id)
        booked = [_booking(number, guard, ()) for guard, number in self._own.items()]
        return BookingNews(router_id=self._router_id, booked=booked, whole=True)

    def heartbeat(self) -> BookingNews:
        """Return what is new, or else an empty message that says "I am still here"."""
        return self.take_news() or BookingNews(router_id=self._router_id)

    def whole_every_s(self) -> float:
        """Tell how often a whole message is due."""
        return WHOLE_EVERY_S * (1 + len(self._own) // _WHOLE_BOOKINGS)

    # What comes in.

    def receive(self, news: BookingNews) -> None:
        """Take in a peer's news; the own is ignored."""
        now_s = self._clock.now_s()
        peer = self._peer(news.router_id, now_s)
        if peer is None:
            return
        if news.whole:
            for gone in peer.guards.keys() - {booking.id for booking in news.booked}:
                peer.guards.pop(gone).release()
        for booking in news.booked:
            self._take(peer, booking, now_s)
        for number in peer.guards.keys() & set(news.started):
            peer.guards[number].first_token(now_s)
        for number in news.failed:
            if number in peer.guards:
                self._on_peer_failed(peer.guards[number])
        for number in peer.guards.keys() & set(news.released):
            peer.guards.pop(number).release()
        for told in news.bids:
            bid = None if told.withdrawn else Bid(told.class_order, told.urgency)
            self.bids.hear(news.router_id, ReplicaKey.of(told.replica), bid)

    def expire(self) -> None:
        """Forget peers that have been silent."""
        now_s = self._clock.now_s()
        for name, peer in list(self._peers.items()):
            if now_s - peer.heard_at_s > SILENCE_S:
                del self._peers[name]
                for guard in peer.guards.values():
                    guard.release()

    def num_peers(self) -> int:
        """Count the routers heard of lately, but this one."""
        return len(self._peers)

    def num_peer_bookings(self) -> int:
        """Count what they have under way."""
        return sum(len(peer.guards) for peer in self._peers.values())

    def _peer(self, name: str, now_s: float) -> _Peer | None:
        if not name or name == self._router_id:
            return None
        if name not in self._peers and len(self._peers) >= MAX_PEERS:
            return None
        peer = self._peers.setdefault(name, _Peer(now_s))
        peer.heard_at_s = now_s
        return peer

    def _take(self, peer: _Peer, booking: Booking, now_s: float) -> None:
        guard = peer.guards.get(booking.id)
        if guard is None:
            if len(peer.guards) >= MAX_BOOKINGS_PER_PEER:
                return
            guard = peer.guards[booking.id] = self._loads.book(
                ReplicaKey.of(booking.replica),
                short_ints(booking.block_hashes),
                uncached_tokens=booking.uncached_tokens,
                prompt_tokens=booking.tokens,
                now_s=now_s,
                of_peer=True,
            )
        guard.add_output(booking.tokens - guard.tokens)
        if not booking.uncached_tokens:
            guard.first_token(now_s)

    def _tell_bid(self, replica: ReplicaKey, bid: Bid | None) -> None:
        told = self._pending.bids.add(replica=replica.to_ref(), withdrawn=bid is None)
        if bid is not None:
            told.class_order, told.urgency = bid
        self._changed()

    def _changed(self) -> None:
        pending = self._pending
        if _num_changes(pending) > _MAX_PENDING:
            self._pending = BookingNews(router_id=self._router_id)
        self._on_news()


def _num_changes(news: BookingNews) -> int:
    parts = (news.booked, news.started, news.released, news.bids, news.failed)
    return sum(map(len, parts))


def _booking(number: int, guard: LoadGuard, chain: Sequence[int]) -> Booking:
    return Booking(
        id=number,
        replica=guard.replica.to_ref(),
        uncached_tokens=guard.backlog_tokens,
        tokens=guard.tokens,
        block_hashes=pack_ints(chain),
    )
