"""Pure: how long a prefill will take on a replica.

Tokens per second as the worker measured them, or a default until it has, corrected by the ratio of
observed to predicted time to first token of its last requests.
"""

from __future__ import annotations

import math

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
        default_tokens_per_s: rate of a replica that has not measured its own.
    """

    def __init__(self, default_tokens_per_s: float) -> None:
        self._default_tokens_per_s = default_tokens_per_s
        self._log_correction: dict[ReplicaKey, float] = {}

    def seconds_per_token(self, replica: ReplicaKey, report: LoadReport) -> float:
        """Return the predicted time per uncached prompt token."""
        rate = report.prefill_tokens_per_s
        measured = rate if rate > 0 else self._default_tokens_per_s
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
