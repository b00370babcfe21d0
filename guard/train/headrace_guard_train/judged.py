"""Scores rows as serving does, by models that had not seen their source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_guard.classifiers.cuts import read
from headrace_guard.classifiers.dense import Dense
from headrace_guard.classifiers.heads import LinearHeads
from headrace_guard_train import plan
from headrace_guard_train.fit import Fitted
from headrace_guard_train.matrix import Vector
from headrace_guard_train.operating import Scored
from headrace_guard_train.rows import Row
from headrace_guard_train.states import StateCache


@dataclass(frozen=True)
class Judged:
    """Rows whose source some fold leaves out, one entry a row.

    Args:
        scored: with the linear logit of the highest window.
        folds: which fold left the row's source out.
        texts: the highest windows.
    """

    scored: Scored
    folds: NDArray[np.int64]
    texts: list[str]

    def with_logits(self, logits: Vector) -> Scored:
        """Return the same rows with other logits."""
        one = self.scored
        return Scored(one.rows, one.sources, one.labels, logits)


def judge_linear(head: str, rows: Sequence[Row], fit: Fitted) -> Judged:
    """Score rows with the linear stage."""
    fold_of = {source: idx for idx, sources in enumerate(plan.folds(rows)) for source in sources}
    models = [
        LinearHeads(weights[:, np.newaxis], np.array([bias], np.float32), [head])
        for weights, bias in zip(fit.fold_weights, fit.fold_biases, strict=True)
    ]
    kept = [
        (idx, fold_of[row.source])
        for idx, row in enumerate(rows)
        if head in row.labels and row.source in fold_of
    ]
    logits, texts = np.zeros(len(kept)), []
    for place, (idx, fold) in enumerate(kept):
        text = read(rows[idx].text).text
        peak = models[fold].peaks(text, frozenset({head}))[head]
        logits[place] = peak.logit
        texts.append(text[peak.begin : peak.end])
    scored = Scored(
        np.array([idx for idx, _ in kept]),
        np.array([rows[idx].source for idx, _ in kept]),
        np.array([rows[idx].labels[head] for idx, _ in kept]),
        logits,
    )
    return Judged(scored, np.array([fold for _, fold in kept]), texts)


def judge_dense(
    head: str, judged: Judged, band: float, models: Sequence[Dense], cache: StateCache
) -> Vector:
    """Return the dense stage's logits of windows at or above the band; NaN below it.

    Args:
        head: which logit.
        judged: rows with their windows.
        band: linear logit.
        models: one a fold.
        cache: makes what it does not know.
    """
    logits = np.full(len(judged.texts), np.nan)
    asked = np.flatnonzero(judged.scored.logits >= band).tolist()
    cache.fill(judged.texts[place] for place in asked)
    for place in asked:
        embedded = cache.get(judged.texts[place])
        if embedded is not None:
            logits[place] = models[judged.folds[place]].logits(embedded)[head]
    return logits
