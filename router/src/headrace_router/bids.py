"""Pure: several routers bid for an opening, so that one of them fills it, with the right request.

Each router holds requests in a queue of its own and sees a replica open at the same moment as the
others; what it books there the others learn a few milliseconds later. So before a waiting request
goes, its router tells the others how urgent it is (a bid), waits until their bids have come, and
lets it go only if none of theirs is better. All compare the same told figures, so one wins; and the
order of the waiting requests is kept over all routers.

A bid is good for `BID_TTL_S` and repeated while it stands: a router that vanished, or went another
way, holds up an opening no longer than that. Routers that don't hear one another bid in vain and
herd, as without bids; nothing waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from headrace_common.clock import Clock
from headrace_common.kv_index import ReplicaKey

# From telling a bid to knowing those of the others: news takes 2 ms to gather, about 1 on the way.
SETTLE_S = 0.005
BID_TTL_S = 0.05
# A pass that was planned for the end of `SETTLE_S` is not too early.
_ROUNDING_S = 0.0001
# So long after a bid newcomers have to bid too: bursts are seconds apart.
CONTEST_S = 10.0
# Bound on what peers can make this router hold, beside that on their number.
MAX_REPLICAS = 4096


class Bid(NamedTuple):
    """How urgent a router's best request for a replica is. The least one goes first."""

    # Class of service, negative: the higher one goes first.
    class_order: int
    # The policy's urgency when it was told.
    urgency: float


@dataclass(slots=True)
class _Own:
    request: object
    bid: Bid
    since_s: float
    told_at_s: float
    wanted_at_s: float


class Bids:
    """One router's bids and what it heard of the others'. Belongs to one thread.

    Args:
        router_id: breaks ties, the same way in all routers.
        clock: time.
        has_peers: whether there is anybody to bid against.
        tell: sends a bid to the others; None = it is withdrawn.
    """

    def __init__(
        self,
        router_id: str,
        clock: Clock,
        has_peers: Callable[[], bool],
        tell: Callable[[ReplicaKey, Bid | None], None],
    ) -> None:
        self._router_id, self._clock = router_id, clock
        self._has_peers, self._tell = has_peers, tell
        self._last_bid_at_s = float("-inf")
        self._is_undecided = False
        self._own: dict[ReplicaKey, _Own] = {}
        # By replica and router: the bid, and when it was heard.
        self._heard: dict[ReplicaKey, dict[str, tuple[Bid, float]]] = {}

    def is_contested(self, *, is_queueing: bool) -> bool:
        """Whether a newcomer that goes at once may snatch an opening from one that waits.

        Args:
            is_queueing: requests wait here; bids told lately show whether they do elsewhere.
        """
        is_lately = self._clock.now_s() - self._last_bid_at_s <= CONTEST_S
        return self._has_peers() and (is_queueing or is_lately)

    def next_s(self) -> float | None:
        """Return the time until new bids are decided; None = none since the last call."""
        is_undecided, self._is_undecided = self._is_undecided, False
        return SETTLE_S if is_undecided else None

    def wins(self, replica: ReplicaKey, request: object, bid: Bid) -> bool:
        """Bid for an opening; tell whether the request may go there now.

        Args:
            replica: where it would go.
            request: who; while it is the same one, its first bid stands.
            bid: how urgent it is.
        """
        if not self._has_peers():
            return True
        is_won = self._is_won(replica, request, bid, self._clock.now_s())
        self._is_undecided = self._is_undecided or not is_won
        return is_won

    def _is_won(self, replica: ReplicaKey, request: object, bid: Bid, now_s: float) -> bool:
        own = self._own.get(replica)
        if own is None or own.request is not request or now_s - own.wanted_at_s > BID_TTL_S:
            self._last_bid_at_s = now_s
            self._own[replica] = _Own(request, bid, now_s, now_s, now_s)
            self._tell(replica, bid)
            return False
        own.wanted_at_s = now_s
        if now_s - own.told_at_s > BID_TTL_S / 2:
            own.told_at_s = now_s
            self._tell(replica, own.bid)
        is_settled = now_s - own.since_s >= SETTLE_S - _ROUNDING_S
        return is_settled and not self._is_beaten(replica, own.bid, now_s)

    def withdraw(self, request: object) -> None:
        """Take back the bids of a request that left its queue."""
        for key in [key for key, own in self._own.items() if own.request is request]:
            del self._own[key]
            self._tell(key, None)

    def hear(self, router_id: str, replica: ReplicaKey, bid: Bid | None) -> None:
        """Take a peer's bid; None = it is withdrawn."""
        if bid is None:
            self._heard.get(replica, {}).pop(router_id, None)
            return
        self._last_bid_at_s = self._clock.now_s()
        if replica not in self._heard and len(self._heard) >= MAX_REPLICAS:
            # Replicas that are gone, most likely; bids that stand are repeated.
            self._heard.clear()
        self._heard.setdefault(replica, {})[router_id] = bid, self._last_bid_at_s

    def _is_beaten(self, replica: ReplicaKey, bid: Bid, now_s: float) -> bool:
        heard = self._heard.get(replica, {})
        for name in [name for name, (_, at_s) in heard.items() if now_s - at_s > BID_TTL_S]:
            del heard[name]
        return any((other, name) < (bid, self._router_id) for name, (other, _) in heard.items())


def unopposed(clock: Clock) -> Bids:
    """Return the bids of a router that is alone: all win at once."""
    return Bids("", clock, lambda: False, lambda _replica, _bid: None)
