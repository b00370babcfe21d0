"""What a policy is, and the order of waiting requests that most of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from headrace_router.candidate import Candidate, Query
from headrace_router.fleet_view import FleetView, Outlook
from headrace_router.picker import near_best, pick_one

# Costs this close are equal: predictions are no better than that.
NEAR_RATIO = 0.05
NEAR_S = 0.005
_ANY = Outlook(must_wait=False)


class Policy(Protocol):
    """Chooses among candidates that passed all filters. Keeps no load of its own."""

    name: str

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Candidate | None:
        """Score the candidates (at least one) and return the chosen one; None = wait."""
        ...

    def may_release(self, view: FleetView) -> bool:
        """Tell whether any request could go at all; saves the scan of a long queue.

        True is always right.
        """
        ...

    def outlook(self, query: Query, view: FleetView, hits: Sequence[int]) -> Outlook:
        """Tell cheaply whether `choose` would let this one wait, and for whom."""
        ...

    def gather_s(self, chosen: Candidate) -> float:
        """Tell how long a newcomer that may go waits for more urgent ones of the same moment."""
        ...

    def urgency(self, chosen: Candidate, waited_s: float) -> float:
        """Order requests that may go now: the lowest goes first."""
        ...


class FirstComeFirstServed:
    """Base of the policies that never let a request wait: who waits for room goes by age."""

    def may_release(self, view: FleetView) -> bool:
        """Any: these policies never wait for a busy replica."""
        return True

    def outlook(self, query: Query, view: FleetView, hits: Sequence[int]) -> Outlook:
        """Nobody waits for anybody."""
        return _ANY

    def gather_s(self, chosen: Candidate) -> float:
        """Not at all: whoever came first goes first."""
        return 0.0

    def urgency(self, chosen: Candidate, waited_s: float) -> float:
        """First come, first served."""
        return -waited_s


def cheapest(
    query: Query,
    candidates: Sequence[Candidate],
    cost: Callable[[Candidate], float],
    random: Random,
    *,
    least: float = NEAR_S,
) -> Candidate:
    """Return one of those that cost about least; scores become minus the costs.

    Args:
        query: the request.
        candidates: whom to compare; at least one.
        cost: what one of them costs.
        random: what spreads near-equals.
        least: difference that never counts, in the unit of the costs.
    """
    costs = [cost(one) for one in candidates]
    for one, value in zip(candidates, costs, strict=True):
        one.total_score = -value
    return pick_one(query, near_best(candidates, costs, ratio=NEAR_RATIO, least=least), random)
