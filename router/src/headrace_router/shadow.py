"""Pure: a second policy that is scored on every decision and never used.

It sees the candidates as the used policy saw them, and says where it would have sent the request.
What is counted: how often both agree, and by how much the predicted time to first token of its
choice differs. A shadow that would have let the request wait counts as `wait`.
"""

from __future__ import annotations

from dataclasses import replace

from headrace_router.candidate import Query
from headrace_router.metrics import RouterMetrics
from headrace_router.pick import Choice
from headrace_router.policies.policy import Policy


class Shadow:
    """Compares decisions.

    Args:
        metrics: where agreement is counted.
    """

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    def compare(self, query: Query, choice: Choice, shadow: Policy) -> None:
        """Score the candidates of a choice again, by *shadow*; the choice stays as it is."""
        copies = [
            replace(one, scores={}, total_score=0.0)
            for one in choice.candidates
            if not one.filtered_by
        ]
        other = shadow.choose(query, copies)
        choice.shadow = (shadow.name, None if other is None else other.key)
        if other is None:
            result = "wait"
        else:
            result = "same" if other.key == choice.chosen.key else "other"
            gained_s = choice.chosen.predicted_ttft_s - other.predicted_ttft_s
            self._metrics.shadow_gain_s.observe(gained_s)
        self._metrics.shadow_decisions.labels(shadow.name, result).inc()
