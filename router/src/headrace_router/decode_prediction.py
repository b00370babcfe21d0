"""Pure: how long a request's output will take on a replica, beside the streams that run there.

A step makes one token for each running stream and takes base + slope x streams. On a GPU the slope
is small, on a CPU it is nearly everything; so both are learned per replica, by least squares over
its load reports with slow forgetting, from a prior that gives half of the time to each. Only steps
without any prefill teach it: in mixed ones a busy replica's streams would look dear. A replica
that has not generated yet is taken for one like its peers.

The length of outputs is learned per model: callers ask for up to thousands of tokens and mostly
take few.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from headrace_common.kv_index import ReplicaKey
from headrace_contracts.worker.v1.worker_pb2 import LoadReport

# What a report's facts weigh after the next one, and what the prior weighs, in reports x streams².
_FORGETTING = 0.998
_PRIOR_WEIGHT = 2.0
_LEARNING_RATE = 0.02
# Before any request of a model has ended.
_FIRST_OUTPUT_TOKENS = 256.0
_MAX_MODELS = 1000


class StepTime(NamedTuple):
    """Seconds per step: base + slope x streams."""

    base_s: float
    slope_s: float


UNKNOWN = StepTime(0.0, 0.0)


class _Moments:
    """Weighted sums over (streams, seconds per step)."""

    def __init__(self) -> None:
        self.weight = self.streams = self.seconds = self.squares = self.products = 0.0

    def add(self, streams: float, seconds: float) -> None:
        for name, value in (
            ("weight", 1.0),
            ("streams", streams),
            ("seconds", seconds),
            ("squares", streams * streams),
            ("products", streams * seconds),
        ):
            setattr(self, name, getattr(self, name) * _FORGETTING + value)

    def fit(self) -> StepTime:
        mean_streams, mean_s = self.streams / self.weight, self.seconds / self.weight
        variance = self.squares - self.weight * mean_streams**2
        covariance = self.products - self.weight * mean_streams * mean_s
        prior_s = mean_s / (2 * mean_streams)
        slope_s = (covariance + _PRIOR_WEIGHT * prior_s) / (variance + _PRIOR_WEIGHT)
        slope_s = min(max(slope_s, 0.0), mean_s / mean_streams)
        return StepTime(mean_s - slope_s * mean_streams, slope_s)


class DecodePredictor:
    """Predicts seconds of decode."""

    def __init__(self) -> None:
        self._moments: dict[ReplicaKey, _Moments] = {}
        self._fits: dict[ReplicaKey, StepTime] = {}
        # A report repeats what it told before while no new step has only decoded.
        self._last: dict[ReplicaKey, tuple[float, float]] = {}
        self._output_tokens: dict[str, float] = {}

    def observe(self, replica: ReplicaKey, report: LoadReport) -> None:
        """Learn from a load report."""
        seen = report.decode_step_streams, report.decode_step_s
        if not all(0 < figure < math.inf for figure in seen) or self._last.get(replica) == seen:
            return
        self._last[replica] = seen
        moments = self._moments.setdefault(replica, _Moments())
        moments.add(*seen)
        self._fits[replica] = moments.fit()

    def observe_output(self, model: str, output_tokens: int) -> None:
        """Learn from the length of an output that has ended. *model* must be one that exists."""
        known = self._output_tokens.get(model, _FIRST_OUTPUT_TOKENS)
        if model not in self._output_tokens and len(self._output_tokens) >= _MAX_MODELS:
            return
        self._output_tokens[model] = known + _LEARNING_RATE * (output_tokens - known)

    def output_tokens(self, model: str) -> float:
        """Return how long an output of a model usually is."""
        return self._output_tokens.get(model, _FIRST_OUTPUT_TOKENS)

    def usual_step(self, replicas: Iterable[ReplicaKey]) -> StepTime:
        """Return the median over those of *replicas* that have generated."""
        fits = [self._fits[key] for key in replicas if key in self._fits]
        if not fits:
            return UNKNOWN
        return StepTime(
            statistics.median(one.base_s for one in fits),
            statistics.median(one.slope_s for one in fits),
        )

    def step(self, replica: ReplicaKey, usual: StepTime) -> StepTime:
        """Return a replica's own step time, or *usual* while it has none."""
        return self._fits.get(replica, usual)

    def forget(self, replicas: set[ReplicaKey]) -> None:
        """Keep only what was learned of *replicas*."""
        for known in (self._moments, self._fits, self._last):
            for key in known.keys() - replicas:
                del known[key]
