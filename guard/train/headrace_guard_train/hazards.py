"""Which hazard a harmful request is about: learnt from the own templates, whose hazard is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace_guard_train.instances import Instance
from headrace_guard_train.matrix import Vector, minimise
from headrace_guard_train.rows import HAZARDS, Row
from headrace_guard_train.states import StateCache

NUM_WORD_BUCKETS = 4096
_WORD_PENALTY, _VECTOR_PENALTY = 0.3, 1.0


@dataclass(frozen=True)
class Hazards:
    """Weights of both hazard models, and the share that each gets right on rows it had not seen."""

    words: NDArray[np.float32]
    vectors: NDArray[np.float32]
    biases: NDArray[np.float32]
    right_by_words: float
    right_by_vectors: float


def fit(windows: Sequence[Instance], rows: Sequence[Row], cache: StateCache) -> Hazards:
    """Fit both models on windows whose row has a hazard; every fifth row is held out to judge."""
    known = [one for one in windows if rows[one.row_idx].hazard is not None]
    labels = np.array([HAZARDS.index(str(rows[one.row_idx].hazard)) for one in known])
    words = np.array([_words(one) for one in known])
    embedded = [(idx, cache.get(one.text)) for idx, one in enumerate(known)]
    kept = [idx for idx, found in embedded if found is not None]
    vectors = np.array([found.vector for _, found in embedded if found is not None], np.float64)
    word_weights, word_bias, word_right = _softmax(words, labels, _WORD_PENALTY)
    vector_weights, vector_bias, vector_right = _softmax(vectors, labels[kept], _VECTOR_PENALTY)
    return Hazards(
        word_weights.astype(np.float32),
        vector_weights.T.astype(np.float32),
        np.stack([word_bias, vector_bias]).astype(np.float32),
        word_right,
        vector_right,
    )


def _words(window: Instance) -> Vector:
    counts = np.bincount(window.buckets % NUM_WORD_BUCKETS, minlength=NUM_WORD_BUCKETS)
    scaled: Vector = counts / np.sqrt(max(len(window.buckets), 1))
    return scaled


def _softmax(
    inputs: Vector, labels: NDArray[np.int64], penalty: float
) -> tuple[Vector, Vector, float]:
    held = np.arange(len(labels)) % 5 == 0
    weights, bias = _fit(inputs[~held], labels[~held], penalty)
    right = float(np.mean((inputs[held] @ weights + bias).argmax(axis=1) == labels[held]))
    return *_fit(inputs, labels, penalty), right


def _fit(inputs: Vector, labels: NDArray[np.int64], penalty: float) -> tuple[Vector, Vector]:
    num, size = len(labels), (inputs.shape[1], len(HAZARDS))
    target = np.eye(len(HAZARDS))[labels]

    def loss(point: Vector) -> tuple[float, Vector]:
        weights, bias = point[: -len(HAZARDS)].reshape(size), point[-len(HAZARDS) :]
        logits = inputs @ weights + bias
        logits -= logits.max(axis=1, keepdims=True)
        shares = np.exp(logits)
        shares /= shares.sum(axis=1, keepdims=True)
        value = -np.log(np.maximum(shares[np.arange(num), labels], 1e-12)).sum()
        residuals = shares - target
        gradient = np.concatenate(
            [(inputs.T @ residuals + penalty * weights).ravel(), residuals.sum(axis=0)]
        )
        return float(value + 0.5 * penalty * np.sum(weights**2)), gradient

    point = minimise(loss, np.zeros(size[0] * size[1] + len(HAZARDS)), 40)
    return point[: -len(HAZARDS)].reshape(size), point[-len(HAZARDS) :]
