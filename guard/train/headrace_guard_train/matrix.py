"""Sparse rows of n-gram features and a logistic regression over them; numpy alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_guard.classifiers.ngrams import NUM_BUCKETS

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Matrix:
    """Compressed sparse rows. Every row's values have Euclidean weight as in serving."""

    starts: NDArray[np.int64]
    buckets: NDArray[np.int32]
    values: NDArray[np.float32]

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.starts) - 1

    def dot(self, weights: NDArray[np.float32]) -> Vector:
        """Multiply with a vector over buckets."""
        products = self.values * weights[self.buckets]
        padded = np.append(products, np.float32(0))
        sums = np.asarray(np.add.reduceat(padded, self.starts[:-1]), np.float64)
        # Of an empty row `reduceat` gives the next row's first product.
        sums[np.diff(self.starts) == 0] = 0.0
        return sums

    def dot_transposed(self, residuals: Vector) -> Vector:
        """Multiply the transpose with a vector over rows."""
        per_value = np.repeat(residuals.astype(np.float32), np.diff(self.starts))
        sums = np.bincount(self.buckets, self.values * per_value, NUM_BUCKETS)
        return np.asarray(sums, np.float64)

    def take(self, rows: NDArray[np.int64]) -> Matrix:
        """Return some of the rows."""
        lengths = np.diff(self.starts)[rows]
        starts = np.concatenate(([0], np.cumsum(lengths)))
        picked = np.repeat(self.starts[rows] - starts[:-1], lengths) + np.arange(starts[-1])
        return Matrix(starts, self.buckets[picked], self.values[picked])


def stack(rows: Sequence[NDArray[np.int32]]) -> Matrix:
    """Return a matrix of bucket lists; counts are divided by the root of the list's length."""
    buckets: list[NDArray[np.int32]] = []
    values: list[NDArray[np.float32]] = []
    for row in rows:
        found, counts = np.unique(row, return_counts=True)
        buckets.append(found.astype(np.int32))
        values.append((counts / np.sqrt(max(len(row), 1))).astype(np.float32))
    starts = np.concatenate(([0], np.cumsum([len(one) for one in buckets]))).astype(np.int64)
    return _without_rare(Matrix(starts, np.concatenate(buckets), np.concatenate(values)))


def _without_rare(matrix: Matrix) -> Matrix:
    """Drop what only one row has: nothing can be learnt from it that holds elsewhere."""
    num_rows = np.bincount(matrix.buckets, minlength=NUM_BUCKETS)
    kept = num_rows[matrix.buckets] > 1
    rows = np.repeat(np.arange(matrix.num_rows), np.diff(matrix.starts))
    counts = np.bincount(rows[kept], minlength=matrix.num_rows)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return Matrix(starts, matrix.buckets[kept], matrix.values[kept])


def fit_logistic(
    matrix: Matrix, labels: Vector, row_weights: Vector, penalty: float, num_steps: int = 30
) -> tuple[NDArray[np.float32], float]:
    """Fit weights and a bias, squared penalty on the weights.

    Args:
        matrix: the rows.
        labels: 0 or 1.
        row_weights: how much each counts; they should sum to about the number of rows.
        penalty: of the squared weights.
        num_steps: of the minimiser.
    """

    def loss(point: Vector) -> tuple[float, Vector]:
        logits = matrix.dot(point[:-1].astype(np.float32)) + point[-1]
        value = np.sum(row_weights * (np.logaddexp(0, logits) - labels * logits))
        residuals = row_weights * (1 / (1 + np.exp(-logits)) - labels)
        gradient = np.append(matrix.dot_transposed(residuals), residuals.sum())
        gradient[:-1] += penalty * point[:-1]
        return float(value + 0.5 * penalty * point[:-1] @ point[:-1]), gradient

    point = minimise(loss, np.zeros(NUM_BUCKETS + 1), num_steps)
    return point[:-1].astype(np.float32), float(point[-1])


def minimise(
    loss: Callable[[Vector], tuple[float, Vector]], start: Vector, num_steps: int
) -> Vector:
    """Minimise by L-BFGS (Nocedal 1980) with a backtracking line search."""
    point = start
    history: list[tuple[Vector, Vector]] = []
    value, gradient = loss(point)
    for _ in range(num_steps):
        direction = -_two_loops(gradient, history)
        slope = float(direction @ gradient)
        if slope > -1e-10:
            break
        step = 1.0 if history else 1.0 / (1e-12 + np.abs(gradient).sum())
        for _ in range(20):
            new_point = point + step * direction
            new_value, new_gradient = loss(new_point)
            if new_value <= value + 1e-4 * step * slope:
                break
            step *= 0.5
        moved, turned = new_point - point, new_gradient - gradient
        if moved @ turned > 1e-12:
            history = [*history[-7:], (moved, turned)]
        done = abs(value - new_value) < 1e-5 * abs(value)
        point, value, gradient = new_point, new_value, new_gradient
        if done:
            break
    return point


def _two_loops(gradient: Vector, history: list[tuple[Vector, Vector]]) -> Vector:
    result, alphas = gradient.copy(), []
    for moved, turned in reversed(history):
        alpha = (moved @ result) / (moved @ turned)
        alphas.append(alpha)
        result -= alpha * turned
    if history:
        moved, turned = history[-1]
        result *= (moved @ turned) / (turned @ turned)
    for (moved, turned), alpha in zip(history, reversed(alphas), strict=True):
        result += (alpha - (turned @ result) / (moved @ turned)) * moved
    return result
