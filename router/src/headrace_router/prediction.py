"""Pure: how long a prefill will take on a replica.

Tokens per second as the worker measured them, corrected by the ratio of observed to predicted time
to first token of its last requests. A worker that has not measured yet is taken for one like its
peers: an optimistic constant would make every fresh replica look faster than one with the prefix.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from headrace_common.kv_index import ReplicaKey
from headrace_contracts.worker.v1.worker_pb2 import LoadReport

# Weight of one observation, and how far correction may go.
_LEARNING_RATE = 0.1
_MAX_LOG_CORRECTION = math.log(4.0)
# Below this, fixed costs outweigh the prefill and say nothing about its rate.
_MIN_PREDICTED_S = 0.02


class PrefillPredictor:
    """Predicts seconds of prefill.

    Args:
        default_tokens_per_s: rate of a replica while none of its peers has measured one.
    """

    def __init__(self, default_tokens_per_s: float) -> None:
        self._default_tokens_per_s = default_tokens_per_s
        self._log_correction: dict[ReplicaKey, float] = {}

    def usual_rate(self, reports: Iterable[LoadReport]) -> float:
        """Return the median measured rate of a model's replicas, tokens per second."""
        measured = [r.prefill_tokens_per_s for r in reports if r.prefill_tokens_per_s > 0]
        return statistics.median(measured) if measured else self._default_tokens_per_s

    def seconds_per_token(
        self, replica: ReplicaKey, report: LoadReport, usual_rate: float
    ) -> float:
        """Return the predicted time per uncached prompt token.

        Args:
            replica: whose time.
            report: its last load report.
            usual_rate: of its peers, from `usual_rate`; for a replica that has not measured.
        """
        rate = report.prefill_tokens_per_s
        measured = rate if rate > 0 else usual_rate
        correction = self._log_correction.get(replica)
        return 1 / measured if correction is None else math.exp(correction) / measured

    def observe(self, replica: ReplicaKey, predicted_s: float, observed_s: float) -> None:
        """Learn from the time that a request's first token really took."""
        if predicted_s < _MIN_PREDICTED_S or observed_s <= 0:
            return
        known = self._log_correction.get(replica, 0.0)
        moved = known + _LEARNING_RATE * math.log(observed_s / predicted_s)
        bounded = max(-_MAX_LOG_CORRECTION, min(_MAX_LOG_CORRECTION, moved))
        self._log_correction[replica] = bounded

    def forget(self, replicas: set[ReplicaKey]) -> None:
        """Keep only what was learned of *replicas*."""
        known = self._log_correction
        self._log_correction = {key: known[key] for key in known.keys() & replicas}
