"""Puts the stages of a head together on left-out sources: band, share, scale, thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace_guard.classifiers.dense import Dense
from headrace_guard.classifiers.heads import HARM, INDIRECT, INJECTION, TOXICITY
from headrace_guard.classifiers.text_model import Point
from headrace_guard_train import plan
from headrace_guard_train.judged import Judged, judge_dense
from headrace_guard_train.operating import Scored, calibrate, only, source_weights, thresholds
from headrace_guard_train.states import StateCache

# Share of ordinary texts of unseen sources that the embedding stage may be asked about, by head; of
# the three that a user's text is read for, together below a tenth.
BAND_RATIOS = {INJECTION: 0.02, INDIRECT: 0.07, HARM: 0.06, TOXICITY: 0.015}
LINEAR_SHARES = (0.0, 0.25, 0.5, 1.0)
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


def linear_figures(judged: Judged) -> HeadFigures:
    """Return the figures of the linear stage alone."""
    stage = _stage(judged.scored)
    return HeadFigures(stage, stage, np.inf, 1.0, 0.0)


def figures_of(
    head: str, judged: Judged, models: Sequence[Dense], cache: StateCache
) -> HeadFigures:
    """Put the stages of a head together; the share of the linear logit is chosen out of source."""
    flat = judged.scored
    band = _band(flat, BAND_RATIOS[head])
    dense_logits = judge_dense(head, judged, band, models, cache)
    best: tuple[float, float, Scored] | None = None
    for share in LINEAR_SHARES:
        summed = dense_logits + share * flat.logits
        scored = judged.with_logits(np.where(np.isnan(summed), _FLOOR, summed))
        value = _merit(scored)
        if best is None or value > best[0]:
            best = (value, share, scored)
    assert best is not None  # noqa: S101 - there is at least one share
    clean = flat.clean()
    asked = float(source_weights(flat.sources[clean]) @ (flat.logits[clean] >= band))
    return HeadFigures(_stage(flat), _stage(best[2]), band, best[1], asked)


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
    ordinary = only(scored, scored.clean() & np.isin(scored.sources, sorted(plan.ORDINARY)))
    order = np.argsort(-ordinary.logits)
    shares = np.cumsum(source_weights(ordinary.sources)[order])
    return float(ordinary.logits[order[int(np.searchsorted(shares, ratio))]])


def _merit(scored: Scored) -> float:
    """Return the mean over positive sources of what is found at the balanced operating point."""
    level = thresholds(scored)[Point.BALANCED]
    found = ~scored.clean()
    names = np.unique(scored.sources[found])
    return float(
        np.mean([np.mean(scored.logits[found & (scored.sources == one)] >= level) for one in names])
    )
