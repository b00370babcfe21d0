"""From logits to probabilities and thresholds, and the figures that are reported."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_guard.classifiers.text_model import Point
from headrace_guard_train.matrix import Vector, minimise

# Share of clean texts that may be hit, each source counting the same.
FALSE_RATIOS = {Point.STRICT: 0.05, Point.BALANCED: 0.01, Point.LENIENT: 0.001, Point.ALL: 1.0}
# At `BALANCED` no single clean source may have more than this.
MAX_SOURCE_RATIO = 0.05


@dataclass(frozen=True)
class Scored:
    """Rows with a logit from a model that had not seen their source, one entry a row."""

    rows: NDArray[np.int64]
    sources: NDArray[np.str_]
    labels: NDArray[np.int64]
    logits: Vector

    def clean(self) -> NDArray[np.bool_]:
        """Return which rows are clean."""
        is_clean: NDArray[np.bool_] = self.labels == 0
        return is_clean


def source_weights(sources: NDArray[np.str_]) -> Vector:
    """Return weights with which each source counts the same; they sum to one."""
    names, inverse, counts = np.unique(sources, return_inverse=True, return_counts=True)
    return np.asarray(1 / (counts[inverse] * len(names)), np.float64)


def calibrate(scored: Scored) -> tuple[float, float]:
    """Fit slope and offset of the probability (Platt 1999), both labels and all sources alike."""
    weights = np.zeros(len(scored.labels))
    for label in (0, 1):
        mine = scored.labels == label
        weights[mine] = source_weights(scored.sources[mine]) * len(weights) / 2

    def loss(point: Vector) -> tuple[float, Vector]:
        logits = point[0] * scored.logits + point[1]
        value = np.sum(weights * (np.logaddexp(0, logits) - scored.labels * logits))
        residuals = weights * (1 / (1 + np.exp(-logits)) - scored.labels)
        return float(value), np.array([residuals @ scored.logits, residuals.sum()])

    slope, offset = minimise(loss, np.array([1.0, 0.0]), 60)
    return max(float(slope), 1e-3), float(offset)


def thresholds(scored: Scored) -> dict[Point, float]:
    """Return the logit of each operating point; -inf for `Point.ALL`."""
    clean = scored.clean()
    logits, sources = scored.logits[clean], scored.sources[clean]
    weights = source_weights(sources)
    order = np.argsort(-logits)
    shares = np.cumsum(weights[order])
    found: dict[Point, float] = {Point.ALL: -np.inf}
    for point in (Point.STRICT, Point.BALANCED, Point.LENIENT):
        place = min(int(np.searchsorted(shares, FALSE_RATIOS[point])), len(order) - 1)
        found[point] = float(logits[order[place]]) + 1e-6
    for source in np.unique(sources):
        mine = logits[sources == source]
        # A row's own logit: one between two rows' lets a small source have a hit too many.
        most = np.quantile(mine, 1 - MAX_SOURCE_RATIO, method="inverted_cdf")
        found[Point.BALANCED] = max(found[Point.BALANCED], float(most) + 1e-6)
    found[Point.LENIENT] = max(found[Point.LENIENT], found[Point.BALANCED])
    return found


def auc(positive: Vector, clean: Vector) -> float:
    """Return the area under the ROC curve."""
    both = np.concatenate([positive, clean])
    _, inverse, counts = np.unique(both, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    num = len(positive)
    return float((ranks[:num].sum() - num * (num + 1) / 2) / (num * len(clean)))


def true_ratio_at(positive: Vector, clean: Scored, false_ratio: float) -> float:
    """Return the share of positives above the level that *false_ratio* of the clean rows pass."""
    order = np.argsort(-clean.logits)
    shares = np.cumsum(source_weights(clean.sources)[order])
    place = min(int(np.searchsorted(shares, false_ratio)), len(order) - 1)
    return float(np.mean(positive > clean.logits[order[place]]))


def ordinary(scored: Scored, sources: frozenset[str]) -> Scored:
    """Return the clean rows of *sources*; all clean rows if none of these was judged."""
    clean = only(scored, scored.clean())
    found = only(clean, np.isin(clean.sources, sorted(sources)))
    return found if len(found.rows) else clean


def only(scored: Scored, kept: NDArray[np.bool_]) -> Scored:
    """Return some of the rows."""
    return Scored(scored.rows[kept], scored.sources[kept], scored.labels[kept], scored.logits[kept])
