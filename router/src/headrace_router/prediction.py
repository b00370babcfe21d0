"""Pure: how long a prefill will take on a replica.

The worker measures tokens per second over its last steps: a noisy figure, since a long prompt costs
more per token than a short one, and the tail of a prompt takes a whole step. A replica that seems
slower by such noise would lose the requests whose prefix it holds, so the figure is averaged over
hundreds of reports; a replica of which little is known, or that is within a factor of 1.5 of its
peers, is taken for one of them: what counts is to be right about differences. In simulation the raw
figure cost 16 of 96 points of requests inside their goal.

The times to first token that were really seen correct it: all replicas together soon, each one's
own difference slowly. One slow prefill, beside a burst of streams on the same machine, says little
about its replica; blamed on that alone it would have kept a second home from every hot prefix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace_common.kv_index import ReplicaKey
from headrace_contracts.worker.v1.worker_pb2 import LoadReport

# Weight of one report, and of one observed prefill of a second or more, once there were many.
_REPORT_WEIGHT = 0.002
_LEARNING_RATE = 0.05
# Of what sets one replica apart.
_OWN_LEARNING_RATE = 0.03
# How far correction may go.
_MAX_LOG_CORRECTION = math.log(32.0)
# Below this, fixed costs outweigh the prefill and say nothing about its rate.
_MIN_PREDICTED_S = 0.02
# Replicas whose times differ by less than this factor are alike.
_LOG_ALIKE = math.log(1.5)
# What is known of the peers weighs as much as so much evidence of a replica's own.
_PEERS_EVIDENCE = 20.0
_MAX_EVIDENCE = 500.0


@dataclass(slots=True)
class _Known:
    """What was learned of one replica."""

    # The last figure of its reports: told again and again, it is no news.
    last_rate: float = 0.0
    num_reports: int = 0
    # Mean logarithm of seconds per token in its reports; None = not measured.
    log_token_s: float | None = None
    num_observed: int = 0
    # Beside the correction that all have in common.
    log_correction: float = 0.0
    # What follows from these: how much they weigh, and the logarithm of seconds per token.
    evidence: float = 0.0
    log_own_s: float = 0.0

    def settle(self, log_default_s: float) -> None:
        # A time to first token that was seen says more than a report.
        self.evidence = min(self.num_reports + 10.0 * self.num_observed, _MAX_EVIDENCE)
        measured = log_default_s if self.log_token_s is None else self.log_token_s
        self.log_own_s = measured + self.log_correction


# Of a replica that never said anything. Never changed.
_UNKNOWN = _Known()


class PrefillPredictor:
    """Predicts seconds of prefill.

    Args:
        default_tokens_per_s: rate of a replica while none of its peers has measured one.
    """

    def __init__(self, default_tokens_per_s: float) -> None:
        self._log_default_s = -math.log(default_tokens_per_s)
        # Correction that all replicas have in common, and how often it was moved.
        self._log_correction, self._num_observed = 0.0, 0
        self._known: dict[ReplicaKey, _Known] = {}

    def observe_report(self, replica: ReplicaKey, report: LoadReport) -> None:
        """Learn from what the worker measured."""
        rate = report.prefill_tokens_per_s
        known = self._known.setdefault(replica, _Known())
        if not 0 < rate < math.inf or rate == known.last_rate:
            return
        known.last_rate = rate
        known.num_reports += 1
        mean = known.log_token_s or 0.0
        weight = max(_REPORT_WEIGHT, 1 / known.num_reports)
        known.log_token_s = mean + weight * (-math.log(rate) - mean)
        known.settle(self._log_default_s)

    def observe(self, replica: ReplicaKey, predicted_s: float, observed_s: float) -> None:
        """Learn from the time that a request's first token really took."""
        if not (_MIN_PREDICTED_S <= predicted_s < math.inf and 0 < observed_s < math.inf):
            return
        self._num_observed += 1
        ratio = math.log(observed_s / predicted_s)
        # A short prefill mostly waits for the step under way. The first ones tell most.
        weight = min(predicted_s, 1.0) * max(_LEARNING_RATE, 1 / (self._num_observed + 1))
        self._log_correction = _bounded(self._log_correction + weight * ratio)
        known = self._known.setdefault(replica, _Known())
        known.num_observed += 1
        own_weight = min(predicted_s, 1.0) * _OWN_LEARNING_RATE
        # Both together stay within the bound.
        moved = _bounded(self._log_correction + known.log_correction + own_weight * ratio)
        known.log_correction = moved - self._log_correction
        known.settle(self._log_default_s)

    def token_times_s(self, replicas: Sequence[ReplicaKey]) -> tuple[float, list[float]]:
        """Predict seconds per uncached prompt token.

        Args:
            replicas: all that serve a model.

        Returns:
            What is usual among them, the mean by evidence; and each one's own.
        """
        everyone = [self._known.get(key, _UNKNOWN) for key in replicas]
        total = weights = 0.0
        for known in everyone:
            total += known.evidence * known.log_own_s
            weights += known.evidence
        log_usual_s = total / weights if weights else self._log_default_s
        log_usual_s += self._log_correction
        usual_s = math.exp(log_usual_s)
        times = []
        for known in everyone:
            difference = known.log_own_s + self._log_correction - log_usual_s
            difference *= known.evidence / (known.evidence + _PEERS_EVIDENCE)
            is_alike = not known.evidence or abs(difference) < _LOG_ALIKE
            times.append(usual_s if is_alike else math.exp(log_usual_s + difference))
        return usual_s, times

    def forget(self, replicas: set[ReplicaKey]) -> None:
        """Keep only what was learned of *replicas*."""
        for key in self._known.keys() - replicas:
            del self._known[key]


def _bounded(log_correction: float) -> float:
    return max(-_MAX_LOG_CORRECTION, min(_MAX_LOG_CORRECTION, log_correction))
