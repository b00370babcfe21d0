"""Fits the linear heads: once per fold for out-of-source logits, once on everything."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace_guard_train import matrix as minimiser
from headrace_guard_train import plan
from headrace_guard_train.instances import Cutter, Instance
from headrace_guard_train.kept import Arrays, Kept
from headrace_guard_train.matrix import Matrix, Vector, fit_logistic, stack
from headrace_guard_train.rows import Row

LINEAR_PENALTY = 1.0
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
        weights: shares of the rows.
        near: other sources with a row much like its row.
    """

    items: list[Instance]
    sources: NDArray[np.str_]
    labels: NDArray[np.int64]
    rows: NDArray[np.int64]
    weights: Vector
    near: list[frozenset[str]]


@dataclass(frozen=True)
class Fitted:
    """The linear stage of one head.

    Args:
        fold_weights: of the models that had not seen a fold's sources, one row a fold.
        fold_biases: theirs.
        weights: fitted on everything; empty if that was not wanted.
        bias: fitted on everything.
    """

    fold_weights: NDArray[np.float32]
    fold_biases: Vector
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
        [rows[one.row_idx].near for one in items],
    )


def fit_linear(
    head: str, cutter: Cutter, is_final: bool = True, kept: Kept | None = None
) -> Fitted:
    """Fit the linear stage of a head.

    Args:
        head: which one.
        cutter: cuts the rows.
        is_final: whether to fit on everything too.
        kept: keeps each fit, so that a run that is cut does not do it again.
    """
    windows = windows_of(cutter.instances(head), cutter.rows)
    matrix = stack([one.buckets for one in windows.items])
    fits: list[tuple[NDArray[np.float32], float]] = []
    left = [*plan.folds(cutter.rows), *([frozenset[str]()] if is_final else [])]
    for left_out in left:
        is_in = plan.is_learnt(windows.sources.tolist(), windows.near, plan.unlearnt(left_out))
        is_in &= windows.labels >= 0
        fits.append(_fit_linear(windows, matrix, np.flatnonzero(is_in), kept))
        sys.stderr.write(f"{head}: linear fit {len(fits)} done\n")
    last = fits.pop() if is_final else (np.zeros(0, np.float32), 0.0)
    fold_weights = np.array([one for one, _ in fits], np.float32)
    return Fitted(fold_weights, np.array([one for _, one in fits]), *last)


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
    windows: Windows, matrix: Matrix, learnt: NDArray[np.int64], kept: Kept | None
) -> tuple[NDArray[np.float32], float]:
    weights = balanced(windows.sources[learnt], windows.labels[learnt], windows.weights[learnt])
    labels = windows.labels[learnt].astype(np.float64)
    taken = matrix.take(learnt)

    def make() -> Arrays:
        found, bias = fit_logistic(taken, labels, weights, LINEAR_PENALTY, _NUM_STEPS)
        return {"weights": found, "bias": np.array(bias)}

    made_from = (*vars(taken).values(), labels, weights, LINEAR_PENALTY, _NUM_STEPS, _program())
    made = make() if kept is None else kept.arrays("fit", made_from, make)
    return made["weights"].astype(np.float32), float(made["bias"].item())


def _program() -> bytes:
    """Return the text of the program that makes a fit of its arguments."""
    return Path(minimiser.__file__).read_bytes()
