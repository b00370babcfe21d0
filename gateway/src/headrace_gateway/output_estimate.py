"""How long answers become when nobody bounds them: the 95th percentile by model.

A request without max_tokens could take thousands of tokens and takes a few hundred. Rates reserve
the estimate and settle the truth; money is held for the most that is possible, so that no budget
is overrun.
"""

from __future__ import annotations

from bisect import bisect_left

# Upper bounds of the counts' buckets: steps of a fifth, from one token to a million.
_BOUNDS = sorted({round(1.2**step) for step in range(77)})
# Fewer answers say nothing about their 95th percentile.
_MIN_SAMPLES = 40
# At so many all counts are halved, so that the estimate follows what the model does now.
_MAX_SAMPLES = 2000
_QUANTILE = 0.95


class OutputEstimates:
    """What unbounded answers of each model took. Pure; holds a few hundred numbers per model."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}

    def add(self, model: str, output_tokens: int) -> None:
        """Count one answer (one choice) that ended by itself."""
        counts = self._counts.setdefault(model, [0] * len(_BOUNDS))
        counts[min(bisect_left(_BOUNDS, output_tokens), len(_BOUNDS) - 1)] += 1
        if sum(counts) > _MAX_SAMPLES:
            self._counts[model] = [count // 2 for count in counts]

    def get(self, model: str) -> int | None:
        """Return what 95 of 100 answers stay within. Tokens; None = too few were seen."""
        counts = self._counts.get(model, [])
        total = sum(counts)
        if total < _MIN_SAMPLES:
            return None
        seen = 0
        for bound, count in zip(_BOUNDS, counts, strict=True):
            seen += count
            if seen >= _QUANTILE * total:
                return bound
        return _BOUNDS[-1]
