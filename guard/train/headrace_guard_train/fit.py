"""Fits the heads: once per fold for out-of-source logits, once on everything for the artefact."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_guard_train import plan
from headrace_guard_train.instances import Cutter, Instance
from headrace_guard_train.matrix import Matrix, Vector, fit_logistic, minimise, stack
from headrace_guard_train.rows import Row
from headrace_guard_train.vectors import VectorCache

LINEAR_PENALTY, EMBEDDING_PENALTY = 1.0, 5.0
# A source counts by its size to this power: neither by its size nor all the same.
_SOURCE_POWER = 0.7
_NUM_STEPS = 25


@dataclass(frozen=True)
class Windows:
    """The windows of one head as arrays, one entry a window.

    Args:
        items: the windows.
        sources: where each is from.
        labels: 1, 0, or -1 for not known.
        rows: index of the row.
    """

    items: list[Instance]
    sources: NDArray[np.str_]
    labels: NDArray[np.int64]
    rows: NDArray[np.int64]
    weights: Vector


@dataclass(frozen=True)
class Fitted:
    """One stage of one head.

    Args:
        windows: what it was fitted on.
        logits: of a model that had not seen the window's source; NaN for sources never left out.
        weights: fitted on everything.
        bias: fitted on everything.
    """

    windows: Windows
    logits: Vector
    weights: NDArray[np.float32]
    bias: float


def windows_of(items: Sequence[Instance], rows: Sequence[Row]) -> Windows:
    """Put windows into arrays."""
    return Windows(
        list(items),
        np.array([rows[one.row_idx].source for one in items]),
        np.array([-1 if one.label is None else one.label for one in items]),
        np.array([one.row_idx for one in items]),
        np.array([one.weight for one in items]),
    )


def fit_linear(head: str, cutter: Cutter, is_final: bool = True) -> Fitted:
    """Fit the linear stage of a head."""
    rows = cutter.rows
    windows = windows_of(cutter.instances(head), rows)
    matrix = stack([one.buckets for one in windows.items])
    logits = np.full(len(windows.items), np.nan)
    for number, fold in enumerate(plan.folds(head, rows), 1):
        out = np.isin(windows.sources, list(fold.left_out))
        weights, bias = _fit_linear(windows, matrix, np.flatnonzero(~out & (windows.labels >= 0)))
        left = np.flatnonzero(out)
        logits[left] = matrix.take(left).dot(weights) + bias
        sys.stderr.write(f"{head}: linear fold {number} done\n")
    weights, bias = np.zeros(0, np.float32), 0.0
    if is_final:
        weights, bias = _fit_linear(windows, matrix, np.flatnonzero(windows.labels >= 0))
    return Fitted(windows, logits, weights, bias)


def fit_embedding(
    head: str, rows: Sequence[Row], linear: Fitted, cache: VectorCache
) -> tuple[Fitted, Vector]:
    """Fit the embedding stage of a head; also return the linear logits of the same windows."""
    chosen = plan.embedded_rows(rows)
    wanted = {id(one) for one in plan.embedded(linear.windows.items, rows, chosen, head)}
    cache.fill(one.text for one in linear.windows.items if id(one) in wanted)
    found = [
        (idx, vector)
        for idx, one in enumerate(linear.windows.items)
        if id(one) in wanted and (vector := cache.get(one.text)) is not None
    ]
    windows = windows_of([linear.windows.items[idx] for idx, _ in found], rows)
    vectors = np.array([vector for _, vector in found], np.float64)
    logits = np.full(len(found), np.nan)
    for fold in plan.folds(head, rows):
        out = np.isin(windows.sources, list(fold.left_out))
        learnt = np.flatnonzero(~out & (windows.labels >= 0))
        weights, bias = _fit_dense(windows, vectors, learnt)
        logits[out] = vectors[out] @ weights + bias
    weights, bias = _fit_dense(windows, vectors, np.flatnonzero(windows.labels >= 0))
    kept = linear.logits[[idx for idx, _ in found]]
    return Fitted(windows, logits, weights.astype(np.float32), bias), kept


def balanced(sources: NDArray[np.str_], labels: NDArray[np.int64], shares: Vector) -> Vector:
    """Return row weights: sources by their size to a power below one, both labels alike."""
    weights = np.zeros(len(sources))
    for source in np.unique(sources):
        for label in (0, 1):
            mine = (sources == source) & (labels == label)
            if mine.any():
                weights[mine] = shares[mine] / shares[mine].sum() * mine.sum() ** _SOURCE_POWER
    for label in (0, 1):
        mine = labels == label
        if mine.any():
            weights[mine] *= len(labels) / 2 / weights[mine].sum()
    return weights


def _fit_linear(
    windows: Windows, matrix: Matrix, learnt: NDArray[np.int64]
) -> tuple[NDArray[np.float32], float]:
    weights = balanced(windows.sources[learnt], windows.labels[learnt], windows.weights[learnt])
    labels = windows.labels[learnt].astype(np.float64)
    return fit_logistic(matrix.take(learnt), labels, weights, LINEAR_PENALTY, _NUM_STEPS)


def _fit_dense(
    windows: Windows, vectors: Vector, learnt: NDArray[np.int64]
) -> tuple[Vector, float]:
    weights = balanced(windows.sources[learnt], windows.labels[learnt], windows.weights[learnt])
    labels = windows.labels[learnt].astype(np.float64)
    inputs = np.hstack([vectors[learnt], np.ones((len(learnt), 1))])

    def loss(point: Vector) -> tuple[float, Vector]:
        logits = inputs @ point
        value = np.sum(weights * (np.logaddexp(0, logits) - labels * logits))
        gradient = inputs.T @ (weights * (1 / (1 + np.exp(-logits)) - labels))
        gradient[:-1] += EMBEDDING_PENALTY * point[:-1]
        return float(value + 0.5 * EMBEDDING_PENALTY * point[:-1] @ point[:-1]), gradient

    point = minimise(loss, np.zeros(inputs.shape[1]), 100)
    return point[:-1], float(point[-1])
