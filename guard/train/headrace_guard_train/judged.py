"""Scores rows as serving does, by models that had not seen their source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace_guard.classifiers.cuts import read_all
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
    """Rows whose source some fold leaves out, one entry a row, and their highest windows.

    Args:
        scored: rows with the linear logit of the highest window.
        folds: which fold left the row's source out.
        texts: of the windows, those that serving would doubt first.
        places: of each window, the index of its row's entry.
        logits: of each window, the linear one, less its margin.
        margins: of each window, what is taken off what a stage says.
    """

    scored: Scored
    folds: NDArray[np.int64]
    texts: list[str]
    places: NDArray[np.int64]
    logits: Vector
    margins: Vector

    def with_logits(self, logits: Vector) -> Scored:
        """Return the same rows with other logits, each row with its highest window's.

        Args:
            logits: one a window.
        """
        one = self.scored
        highest = np.full(len(one.logits), -np.inf)
        np.maximum.at(highest, self.places, logits)
        return Scored(one.rows, one.sources, one.labels, highest)


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
    texts: list[str] = []
    windows: list[tuple[int, float, float]] = []
    for place, (idx, fold) in enumerate(kept):
        text = rows[idx].text
        for reading in read_all(text):
            for peak in models[fold].peaks(reading, frozenset({head}))[head]:
                texts.append(reading.text[peak.begin : peak.end])
                windows.append((place, peak.logit, peak.margin))
    scored = Scored(
        np.array([idx for idx, _ in kept]),
        np.array([rows[idx].source for idx, _ in kept]),
        np.array([rows[idx].labels[head] for idx, _ in kept]),
        np.zeros(len(kept)),
    )
    places = np.array([place for place, _, _ in windows])
    logits, margins = (np.array([one[idx] for one in windows], np.float64) for idx in (1, 2))
    made = Judged(scored, np.array([fold for _, fold in kept]), texts, places, logits, margins)
    return replace(made, scored=made.with_logits(logits))


def judge_dense(
    head: str,
    judged: Judged,
    is_asked: NDArray[np.bool_],
    models: Sequence[Dense],
    cache: StateCache,
) -> Vector:
    """Return the dense stage's logits of windows that it is asked about; NaN of the others.

    Args:
        head: which logit.
        judged: rows with their windows.
        is_asked: of each window, whether the dense stage looks at it.
        models: one a fold.
        cache: makes what it does not know.
    """
    logits = np.full(len(judged.texts), np.nan)
    asked = np.flatnonzero(is_asked).tolist()
    cache.fill(judged.texts[place] for place in asked)
    for place in asked:
        embedded = cache.get(judged.texts[place])
        if embedded is not None:
            fold = judged.folds[judged.places[place]]
            logits[place] = models[fold].logits(embedded)[head] - judged.margins[place]
    return logits
