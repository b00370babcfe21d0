"""Pure: the rules by which a replica is chosen among those that may be picked.

`hold` is the default: the request waits in the router for the replica where it costs least, as
long as that one has more than a little prefill before it; of those that may go the shortest own
work goes first, with age. Late binding and that order each help, together most. The other policies
release at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from headrace_router.candidate import Candidate, Query
from headrace_router.picker import near_best, pick_one
from headrace_router.scorers import load, prefix, session

# Costs this close are equal: predictions are no better than that.
_NEAR_RATIO = 0.05
_NEAR_S = 0.005
_NEAR_SCORE = 0.01


class Policy(Protocol):
    """Chooses among candidates that passed all filters."""

    name: str

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Candidate | None:
        """Score the candidates (at least one) and return the chosen one; None = wait."""
        ...

    def urgency(self, chosen: Candidate, waited_s: float) -> float:
        """Order requests that may go now: the lowest goes first."""
        ...


@dataclass(frozen=True, slots=True)
class HoldParameters:
    """Knobs of `hold`; the defaults come from a simulation on a real trace."""

    # The request's own prefill counts 1 + this many times against a replica's backlog.
    own_weight: float = 2.0
    # Seconds of own work that one second of waiting is worth.
    ageing_ratio: float = 0.2
    # Predicted prefill backlog at which a replica still takes a request. Seconds.
    slack_s: float = 0.1


class HoldPolicy:
    """cost = backlog + (1 + own_weight) x own; wait while the cheapest replica is busy."""

    name = "hold"

    def __init__(self, parameters: HoldParameters, random: Random) -> None:
        self._weight = 1 + parameters.own_weight
        self._ageing_ratio, self._slack_s = parameters.ageing_ratio, parameters.slack_s
        self._random = random

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the cheapest replica, or None while its backlog is above the slack."""
        costs = [one.backlog_s + self._weight * one.own_s for one in candidates]
        for one, cost in zip(candidates, costs, strict=True):
            one.total_score = -cost
        equals = near_best(candidates, costs, ratio=_NEAR_RATIO, least=_NEAR_S)
        open_ones = [one for one in equals if one.backlog_s <= self._slack_s]
        return pick_one(query, open_ones, self._random) if open_ones else None

    def urgency(self, chosen: Candidate, waited_s: float) -> float:
        """Shortest own work first, with age."""
        return chosen.own_s - self._ageing_ratio * waited_s


Scorer = Callable[[Query, Sequence[Candidate]], list[float]]
SCORERS: dict[str, Scorer] = {
    "prefix": prefix.score,
    "load": load.score,
    "session": session.score,
}


class ScoredPolicy:
    """Highest weighted sum of scores; never waits. `least-load` is the one with load alone."""

    def __init__(self, name: str, weights: dict[str, float], random: Random) -> None:
        self.name = name
        self._weights = [(SCORERS[scorer], scorer, weight) for scorer, weight in weights.items()]
        self._random = random

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the best replica."""
        totals = [0.0] * len(candidates)
        for scorer, name, weight in self._weights:
            for idx, value in enumerate(scorer(query, candidates)):
                candidates[idx].scores[name] = value
                totals[idx] += weight * value
        for one, total in zip(candidates, totals, strict=True):
            one.total_score = total
        costs = [-total for total in totals]
        equals = near_best(candidates, costs, ratio=0.0, least=_NEAR_SCORE)
        return pick_one(query, equals, self._random)

    def urgency(self, chosen: Candidate, waited_s: float) -> float:
        """First come, first served."""
        return -waited_s


class RoundRobinPolicy:
    """One after the other, by worker id."""

    name = "round-robin"

    def __init__(self) -> None:
        self._last = ""

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the next replica after the one chosen last."""
        in_order = sorted(candidates, key=lambda one: one.key)
        later = (one for one in in_order if one.key.worker_id > self._last)
        chosen = next(later, in_order[0])
        self._last = chosen.key.worker_id
        return chosen

    def urgency(self, chosen: Candidate, waited_s: float) -> float:
        """First come, first served."""
        return -waited_s


class RandomPolicy:
    """Any."""

    name = "random"

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return any replica."""
        return candidates[self._random.randrange(len(candidates))]

    def urgency(self, chosen: Candidate, waited_s: float) -> float:
        """First come, first served."""
        return -waited_s
