"""Scores rows as serving does, out of source: linear first, the embedding where the band begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace_guard.classifiers.heads import HARM, INJECTION, TOXICITY
from headrace_guard.classifiers.text_model import Point
from headrace_guard_train.fit import Fitted
from headrace_guard_train.matrix import Vector
from headrace_guard_train.operating import (
    Scored,
    by_row,
    calibrate,
    only,
    source_weights,
    thresholds,
)
from headrace_guard_train.rows import Row

# Share of clean texts that the embedding stage may be asked about, by head.
BAND_RATIOS = {INJECTION: 0.025, HARM: 0.07, TOXICITY: 0.015}
LINEAR_SHARES = (0.5, 1.0, 2.0)
_FLOOR = -20.0


@dataclass(frozen=True)
class Stage:
    """A stage with its scale: rows with out-of-source logits, calibration, thresholds as logits."""

    scored: Scored
    slope: float
    offset: float
    logits: dict[Point, float]

    def probability(self, logit: float) -> float:
        """Return the calibrated probability of a logit."""
        return float(1 / (1 + np.exp(-np.clip(self.slope * logit + self.offset, -30, 30))))


@dataclass(frozen=True)
class HeadFigures:
    """Both stages of a head and how they are put together."""

    linear: Stage
    cascade: Stage
    band_from: float
    linear_share: float
    embedded_ratio: float


def linear_figures(head: str, rows: Sequence[Row], linear: Fitted) -> HeadFigures:
    """Return the figures of a head that has no embedding stage."""
    labels = {idx: row.labels[head] for idx, row in enumerate(rows) if head in row.labels}
    flat = by_row(linear.windows.rows, linear.windows.sources, labels, linear.logits)
    stage = _stage(flat)
    return HeadFigures(stage, stage, np.inf, 1.0, 0.0)


def figures_of(
    head: str, rows: Sequence[Row], linear: Fitted, embedding: Fitted, kept: Vector
) -> HeadFigures:
    """Put the stages of a head together; the share of the linear logit is chosen out of source."""
    labels = {idx: row.labels[head] for idx, row in enumerate(rows) if head in row.labels}
    flat = by_row(linear.windows.rows, linear.windows.sources, labels, linear.logits)
    first = _stage(flat)
    band = _band(flat, BAND_RATIOS[head])
    best: tuple[float, float, Scored] | None = None
    for share in LINEAR_SHARES:
        summed = embedding.logits + share * kept
        summed = np.where(kept < band, _FLOOR, summed)
        scored = by_row(embedding.windows.rows, embedding.windows.sources, labels, summed)
        value = _merit(scored)
        if best is None or value > best[0]:
            best = (value, share, scored)
    assert best is not None  # noqa: S101 - there is at least one share
    clean = flat.clean()
    asked = float(source_weights(flat.sources[clean]) @ (flat.logits[clean] >= band))
    return HeadFigures(first, _stage(best[2]), band, best[1], asked)


def _stage(scored: Scored) -> Stage:
    in_band = only(scored, scored.logits > _FLOOR)
    # Nothing below the band is ever hit: a looser level than the lowest in it would mean nothing.
    lowest = float(in_band.logits[in_band.clean()].min())
    levels = {
        point: logit if point is Point.ALL else max(logit, lowest)
        for point, logit in thresholds(scored).items()
    }
    return Stage(scored, *calibrate(in_band), levels)


def _band(scored: Scored, ratio: float) -> float:
    clean = scored.clean()
    order = np.argsort(-scored.logits[clean])
    shares = np.cumsum(source_weights(scored.sources[clean])[order])
    return float(scored.logits[clean][order[int(np.searchsorted(shares, ratio))]])


def _merit(scored: Scored) -> float:
    """Return the mean over positive sources of what is found at the balanced operating point."""
    level = thresholds(scored)[Point.BALANCED]
    found = ~scored.clean()
    names = np.unique(scored.sources[found])
    return float(
        np.mean([np.mean(scored.logits[found & (scored.sources == one)] >= level) for one in names])
    )
