"""Trains the dense stage: once per fold for out-of-source logits, once on everything.

Inputs are dropped at random and the inner units too, weights decay (Adam with decoupled decay,
Loshchilov and Hutter 2019), labels are smoothed: the network must not lean on what only one source
has. Several networks from different seeds are joined into one of as many times the units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_guard.classifiers.dense import Array, Dense, inputs_of
from headrace_guard.classifiers.heads import HEADS
from headrace_guard_train import plan
from headrace_guard_train.examples import Example
from headrace_guard_train.fit import balanced
from headrace_guard_train.matrix import Vector
from headrace_guard_train.states import StateCache

NUM_UNITS, NUM_SEEDS, NUM_EPOCHS = 128, 2, 8
_BATCH, _RATE, _DECAY, _SMOOTHED = 128, 1e-3, 0.05, 0.02
_INPUTS_DROPPED, _UNITS_DROPPED = 0.2, 0.4
_FIRST, _SECOND, _TINY = 0.9, 0.999, 1e-8


@dataclass(frozen=True)
class Lesson:
    """All windows as arrays, one row a window.

    Args:
        inputs: what the network reads, not scaled.
        labels: one column a head: 1, 0, or -1 for not known.
        sources: where each window is from.
        shares: of its row.
        near: other sources with a row much like its row; empty = of no window.
    """

    inputs: Array
    labels: NDArray[np.int64]
    sources: NDArray[np.str_]
    shares: Vector
    near: Sequence[frozenset[str]] = ()


def lesson_of(items: Sequence[Example], cache: StateCache) -> Lesson:
    """Put windows into arrays; those that the cache does not know are left out."""
    known = [(one, found) for one in items if (found := cache.get(one.text)) is not None]
    return Lesson(
        np.array([inputs_of(found) for _, found in known], np.float32),
        np.array([[one.labels.get(head, -1) for head in HEADS] for one, _ in known]),
        np.array([one.source for one, _ in known]),
        np.array([one.weight for one, _ in known]),
        [one.near for one, _ in known],
    )


def fit_dense(lesson: Lesson, left_out: frozenset[str], num_epochs: int = NUM_EPOCHS) -> Dense:
    """Train on everything but the sources left out."""
    weights = _weights(lesson, left_out)
    learnt = np.flatnonzero(weights.sum(axis=1) > 0)
    inputs = lesson.inputs[learnt]
    shifts, scales = inputs.mean(axis=0), inputs.std(axis=0) + np.float32(1e-3)
    targets = np.maximum(lesson.labels[learnt], 0) * (1 - 2 * _SMOOTHED) + _SMOOTHED
    given = ((inputs - shifts) / scales, targets.astype(np.float32))
    counts = weights[learnt].astype(np.float32)
    made = [_fit_one(*given, counts, seed, num_epochs) for seed in range(NUM_SEEDS)]
    return Dense(
        HEADS,
        shifts,
        scales,
        np.concatenate([one[0] for one in made], axis=1),
        np.concatenate([one[1] for one in made]),
        np.concatenate([one[2] / np.float32(NUM_SEEDS) for one in made]),
        np.mean([one[3] for one in made], axis=0).astype(np.float32),
    )


def packed(dense: Dense, prefix: str) -> dict[str, NDArray[np.generic]]:
    """Return an artefact's arrays, named from *prefix* on: inner weights as signed bytes."""
    columns = np.maximum(np.abs(dense.inner).max(axis=0), 1e-9) / 127
    return {
        f"{prefix}_shifts": dense.shifts,
        f"{prefix}_scales": dense.scales,
        f"{prefix}_inner": np.rint(dense.inner / columns).astype(np.int8),
        f"{prefix}_columns": columns.astype(np.float32),
        f"{prefix}_inner_biases": dense.inner_biases,
        f"{prefix}_outer": dense.outer,
        f"{prefix}_outer_biases": dense.outer_biases,
    }


def _weights(lesson: Lesson, left_out: frozenset[str]) -> Vector:
    near = lesson.near or [frozenset[str]()] * len(lesson.sources)
    is_in = plan.is_learnt(lesson.sources.tolist(), near, plan.unlearnt(left_out))
    weights = np.zeros(lesson.labels.shape)
    for column in range(len(HEADS)):
        mine = np.flatnonzero(is_in & (lesson.labels[:, column] >= 0))
        labels = lesson.labels[mine, column]
        weights[mine, column] = balanced(lesson.sources[mine], labels, lesson.shares[mine])
    return weights


def _fit_one(
    inputs: Array, targets: Array, counts: Array, seed: int, num_epochs: int
) -> list[Array]:
    rng = np.random.default_rng(seed)
    size = inputs.shape[1]
    weights: list[Array] = [
        (rng.standard_normal((size, NUM_UNITS)) * np.sqrt(1 / size)).astype(np.float32),
        np.zeros(NUM_UNITS, np.float32),
        (rng.standard_normal((NUM_UNITS, len(HEADS))) * np.sqrt(1 / NUM_UNITS)).astype(np.float32),
        np.zeros(len(HEADS), np.float32),
    ]
    means = [np.zeros_like(one) for one in weights]
    squares = [np.zeros_like(one) for one in weights]
    num_batches = max(1, len(inputs) // _BATCH)
    num_steps = num_batches * num_epochs
    step = 0
    for _ in range(num_epochs):
        for batch in np.array_split(rng.permutation(len(inputs)), num_batches):
            rate = np.float32(_RATE * (1 - step / num_steps))
            step += 1
            slopes = _slopes(weights, inputs[batch], targets[batch], counts[batch], rng)
            for one, slope, mean, square in zip(weights, slopes, means, squares, strict=True):
                mean += np.float32(1 - _FIRST) * (slope - mean)
                square += np.float32(1 - _SECOND) * (slope * slope - square)
                push = mean / np.float32(1 - _FIRST**step)
                push /= np.sqrt(square / np.float32(1 - _SECOND**step)) + np.float32(_TINY)
                one -= rate * (push + np.float32(_DECAY) * one)
    return weights


def _slopes(
    weights: Sequence[Array], inputs: Array, targets: Array, counts: Array, rng: np.random.Generator
) -> list[Array]:
    """Return the slope of the mean loss in each of the weights."""
    inner, inner_biases, outer, outer_biases = weights
    seen = inputs * _kept(inputs.shape, _INPUTS_DROPPED, rng)
    units = seen @ inner + inner_biases
    passes = (units > 0) * _kept(units.shape, _UNITS_DROPPED, rng)
    units = units * passes
    logits = np.clip(units @ outer + outer_biases, -30, 30)
    errors = counts * (1 / (1 + np.exp(-logits)) - targets) / np.float32(len(inputs))
    back = errors @ outer.T * passes
    return [seen.T @ back, back.sum(axis=0), units.T @ errors, errors.sum(axis=0)]


def _kept(shape: tuple[int, ...], dropped: float, rng: np.random.Generator) -> Array:
    kept = rng.random(shape, np.float32) >= dropped
    return kept.astype(np.float32) / np.float32(1 - dropped)
