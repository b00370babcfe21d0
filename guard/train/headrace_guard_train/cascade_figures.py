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
from headrace_guard_train.matrix import Vector
from headrace_guard_train.operating import (
    Scored,
    calibrate,
    only,
    ordinary,
    source_weights,
    thresholds,
)
from headrace_guard_train.states import StateCache

# Share of ordinary texts of unseen sources that the embedding stage may be asked about, by head; of
# the three that a user's text is read for, together below a tenth. `INDIRECT` reads documents only,
# and its share is one of documents: each has many places to hide something in, and windows of a
# sentence or two, which cost a third of those that users' texts are read by.
BAND_RATIOS = {INJECTION: 0.02, INDIRECT: 0.5, HARM: 0.065, TOXICITY: 0.01}
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
    """All stages of a head and how they are put together.

    Args:
        linear: the linear stage alone.
        cascade: all of them.
        words_share: factor of the words stage's logit beside the linear one.
        band_from: sum of both from which the embedding stage is asked.
        linear_share: factor of that sum beside the dense logit.
        embedded_ratio: share of clean texts that the embedding stage is asked about.
        band_recall: by positive source, the share that reaches the embedding stage.
        asked: rows that do.
    """

    linear: Stage
    cascade: Stage
    words_share: float
    band_from: float
    linear_share: float
    embedded_ratio: float
    band_recall: dict[str, float]
    asked: frozenset[int]


def linear_figures(judged: Judged) -> HeadFigures:
    """Return the figures of the linear stage alone."""
    stage = _stage(judged.scored)
    return HeadFigures(stage, stage, 0.0, np.inf, 1.0, 0.0, {}, frozenset())


def figures_of(
    head: str, judged: Judged, words: Vector, models: Sequence[Dense], cache: StateCache
) -> HeadFigures:
    """Put the stages of a head together; the cheap ones' share is chosen out of source.

    Args:
        head: which one.
        judged: rows and windows.
        words: of each window, the words stage's logit.
        models: dense stages, one a fold.
        cache: makes what it does not know.
    """
    words_share = _words_share(judged, words)
    cheap = judged.logits + words_share * words
    flat = judged.with_logits(cheap)
    band = _band(flat, BAND_RATIOS[head])
    dense_logits = judge_dense(head, judged, cheap >= band, models, cache)
    best: tuple[float, float, Scored] | None = None
    for share in LINEAR_SHARES:
        summed = dense_logits + share * cheap
        scored = judged.with_logits(np.where(np.isnan(summed), _FLOOR, summed))
        value = _merit(scored)
        if best is None or value > best[0]:
            best = (value, share, scored)
    assert best is not None  # noqa: S101 - there is at least one share
    clean = flat.clean()
    asked = float(source_weights(flat.sources[clean]) @ (flat.logits[clean] >= band))
    return HeadFigures(
        _stage(judged.scored),
        _stage(best[2]),
        words_share,
        band,
        best[1],
        asked,
        _recall(flat, band),
        frozenset(flat.rows[flat.logits >= band].tolist()),
    )


def _words_share(judged: Judged, words: Vector) -> float:
    """Return the share with which both cheap stages spread alike over ordinary texts."""
    spreads = [
        ordinary(one, plan.ORDINARY).logits.std()
        for one in (judged.scored, judged.with_logits(words))
    ]
    return float(spreads[0] / spreads[1])


def _recall(scored: Scored, level: float) -> dict[str, float]:
    found = ~scored.clean()
    return {
        source: float(np.mean(scored.logits[found & (scored.sources == source)] >= level))
        for source in np.unique(scored.sources[found]).tolist()
    }


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
    usual = ordinary(scored, plan.ORDINARY)
    order = np.argsort(-usual.logits)
    shares = np.cumsum(source_weights(usual.sources)[order])
    return float(usual.logits[order[int(np.searchsorted(shares, ratio))]])


def _merit(scored: Scored) -> float:
    """Return the mean over positive sources of what is found at the balanced operating point."""
    return float(np.mean(list(_recall(scored, thresholds(scored)[Point.BALANCED]).values())))
