"""Pure: `prefix-threshold`: the best match if it is good enough and the fleet is level.

The rule of SGLang's cache-aware router: when the most and the least busy replica differ by more
than `max_difference` requests and by more than the factor `max_ratio`, take the least busy one;
else the best match if it covers more than `least_match_ratio` of the prompt; else the least busy.
Here to compare: one hot replica switches the affinity of the whole fleet off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from headrace_router.candidate import Candidate, Query
from headrace_router.policies.policy import FirstComeFirstServed, cheapest


@dataclass(frozen=True, slots=True)
class PrefixThresholdParameters:
    """Knobs of `prefix-threshold`."""

    # Share of the prompt that must be cached.
    least_match_ratio: float = 0.5
    # Difference of requests and ratio beyond which the fleet is out of balance.
    max_difference: int = 32
    max_ratio: float = 1.1


class PrefixThresholdPolicy(FirstComeFirstServed):
    """See the module.

    Args:
        parameters: the knobs.
        random: what spreads equals.
    """

    name = "prefix-threshold"

    def __init__(self, parameters: PrefixThresholdParameters, random: Random) -> None:
        self._parameters, self._random = parameters, random

    def choose(self, query: Query, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the best match or the least busy one."""
        chosen_from = candidates
        most_tokens = max(query.cached_tokens(one.hit_blocks) for one in candidates)
        is_good = most_tokens > self._parameters.least_match_ratio * query.prompt_tokens
        if is_good and self._is_level(candidates):
            chosen_from = [
                one for one in candidates if query.cached_tokens(one.hit_blocks) == most_tokens
            ]
        return cheapest(query, chosen_from, lambda one: one.num_requests, self._random, least=0.5)

    def _is_level(self, candidates: Sequence[Candidate]) -> bool:
        counts = [one.num_requests for one in candidates]
        most, least = max(counts), min(counts)
        return (
            most - least <= self._parameters.max_difference
            or most <= self._parameters.max_ratio * least
        )
