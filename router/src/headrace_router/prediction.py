"""Pure: how long a prefill will take on a replica.

The worker measures tokens per second over its last steps: a noisy figure, since a long prompt costs
more per token than a short one, and the tail of a prompt takes a whole step. A replica that seems
slower by such noise would lose the requests whose prefix it holds, so the figure is averaged over
hundreds of reports, corrected slowly by the times to first token that were really seen, and a
replica within a factor of 1.5 of its peers' median is taken for one of them: what counts is to be
right about differences. In simulation the raw figure cost 16 of 96 points of requests inside
their goal.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from headrace_common.kv_index import ReplicaKey
from headrace_contracts.worker.v1.worker_pb2 import LoadReport

# Weight of one report, once there were many.
_REPORT_WEIGHT = 0.002
# Weight of one observed prefill of a second or more, and how far correction may go.
_LEARNING_RATE = 0.05
_MAX_LOG_CORRECTION = math.log(4.0)
# Below this, fixed costs outweigh the prefill and say nothing about its rate.
_MIN_PREDICTED_S = 0.02
# Replicas whose times differ by less are alike.
_ALIKE_RATIO = 1.5


class PrefillPredictor:
    """Predicts seconds of prefill.

    Args:
        default_tokens_per_s: rate of a replica while none of its peers has measured one.
    """

    def __init__(self, default_tokens_per_s: float) -> None:
        self._default_token_s = 1 / default_tokens_per_s
        # Number of reports and mean of the logarithm of seconds per token.
        self._measured: dict[ReplicaKey, tuple[int, float]] = {}
        self._log_correction: dict[ReplicaKey, float] = {}

    def observe_report(self, replica: ReplicaKey, report: LoadReport) -> None:
        """Learn from what the worker measured."""
        if report.prefill_tokens_per_s <= 0:
            return
        log_token_s = -math.log(report.prefill_tokens_per_s)
        count, known = self._measured.get(replica, (0, 0.0))
        weight = max(_REPORT_WEIGHT, 1 / (count + 1))
        self._measured[replica] = count + 1, known + weight * (log_token_s - known)

    def observe(self, replica: ReplicaKey, predicted_s: float, observed_s: float) -> None:
        """Learn from the time that a request's first token really took."""
        if predicted_s < _MIN_PREDICTED_S or observed_s <= 0:
            return
        known = self._log_correction.get(replica, 0.0)
        # A short prefill mostly waits for the step under way.
        weight = _LEARNING_RATE * min(predicted_s, 1.0)
        moved = known + weight * math.log(observed_s / predicted_s)
        self._log_correction[replica] = max(-_MAX_LOG_CORRECTION, min(_MAX_LOG_CORRECTION, moved))

    def usual_token_s(self, replicas: Iterable[ReplicaKey]) -> float:
        """Return the median seconds per uncached token of a model's replicas."""
        known = [self._own_token_s(key) for key in replicas]
        measured = [one for one in known if one is not None]
        return statistics.median(measured) if measured else self._default_token_s

    def token_s(self, replica: ReplicaKey, usual_s: float) -> float:
        """Return the predicted seconds per uncached prompt token.

        Args:
            replica: whose.
            usual_s: of its peers, from `usual_token_s`.
        """
        own_s = self._own_token_s(replica)
        if own_s is None or usual_s / _ALIKE_RATIO < own_s < usual_s * _ALIKE_RATIO:
            return usual_s
        return own_s

    def forget(self, replicas: set[ReplicaKey]) -> None:
        """Keep only what was learned of *replicas*."""
        for known in (self._measured, self._log_correction):
            for key in known.keys() - replicas:
                del known[key]

    def _own_token_s(self, replica: ReplicaKey) -> float | None:
        correction = self._log_correction.get(replica)
        _, measured = self._measured.get(replica, (0, None))
        if measured is None:
            if correction is None:
                return None
            return self._default_token_s * math.exp(correction)
        return math.exp(measured + (correction or 0.0))
