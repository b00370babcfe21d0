"""Trains the words stage: vectors of word pieces from the embedding model, a network on windows.

The network is the dense stage's (`headrace_guard_train.dense_fit`) with other inputs. Nothing needs
to go through the embedding model, so it learns from as many rows as the linear heads do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace_guard.classifiers.dense import Array, Dense
from headrace_guard.classifiers.embedding import SHA256, Embedder
from headrace_guard.classifiers.heads import HEADS
from headrace_guard.classifiers.words import pooled
from headrace_guard_train.dense_fit import Lesson, fit_dense
from headrace_guard_train.examples import Example
from headrace_guard_train.judged import Judged
from headrace_guard_train.kept import Arrays, Kept
from headrace_guard_train.matrix import Vector

NUM_DIMENSIONS = 128
# The vocabulary begins with signs and letters, which say nothing about meaning.
_FIRST_WORD = 1000
_BATCH = 256


@dataclass(frozen=True)
class Vocabulary:
    """Vectors of word pieces as signed bytes."""

    vectors: NDArray[np.int8]
    scale: float

    def inputs(self, pieces: Sequence[Sequence[int]]) -> Array:
        """Return what the network reads of windows, one row a window."""
        return np.array([pooled(self.vectors, self.scale, ids) for ids in pieces], np.float32)


def vocabulary(embedder: Embedder, kept: Kept) -> Vocabulary:
    """Make the vectors, or take them from an earlier run.

    Of what the model says of each piece the leading principal components are kept; frequent pieces,
    which come first, get shorter vectors.
    """

    def make() -> Arrays:
        numbers = range(embedder.num_pieces)
        batches = [numbers[start : start + _BATCH] for start in numbers[::_BATCH]]
        said = np.concatenate([embedder.look_at_pieces(ids) for ids in batches])
        return vars(_packed(said))

    made_from = (sorted(SHA256.items()), Path(__file__).read_bytes())
    found = kept.arrays("words", made_from, make)
    return Vocabulary(found["vectors"].astype(np.int8), float(found["scale"].item()))


def _packed(said: Array) -> Vocabulary:
    centred = said - said[_FIRST_WORD:].mean(axis=0)
    _, axes = np.linalg.eigh(centred[_FIRST_WORD:].T @ centred[_FIRST_WORD:])
    vectors = centred @ axes[:, ::-1][:, :NUM_DIMENSIONS]
    vectors /= vectors.std()
    ranks = np.arange(len(vectors))
    vectors *= (np.log(2 + ranks) / np.log(len(ranks) + 2))[:, np.newaxis]
    scale = float(np.quantile(np.abs(vectors), 0.9999)) / 127
    return Vocabulary(np.clip(np.rint(vectors / scale), -127, 127).astype(np.int8), scale)


def fit_words(
    items: Sequence[Example], words: Vocabulary, embedder: Embedder, folds: Sequence[frozenset[str]]
) -> list[Dense]:
    """Return a network for each fold, and one that has learnt from everything."""
    lesson = Lesson(
        words.inputs([embedder.pieces(one.text) for one in items]),
        np.array([[one.labels.get(head, -1) for head in HEADS] for one in items]),
        np.array([one.source for one in items]),
        np.array([one.weight for one in items]),
        [one.near for one in items],
    )
    return [fit_dense(lesson, left_out) for left_out in (*folds, frozenset[str]())]


def judge_words(
    judged: Mapping[str, Judged], words: Vocabulary, embedder: Embedder, nets: Sequence[Dense]
) -> dict[str, Vector]:
    """Return the logits of each head's windows by networks that had not seen their source."""
    return {head: _judge(head, one, words, embedder, nets) for head, one in judged.items()}


def _judge(
    head: str, judged: Judged, words: Vocabulary, embedder: Embedder, nets: Sequence[Dense]
) -> Vector:
    inputs = words.inputs([embedder.pieces(text) for text in judged.texts])
    folds = judged.folds[judged.places]
    logits = np.zeros(len(inputs))
    for fold in np.unique(folds).tolist():
        net, mine = nets[fold], folds == fold
        found = net.forward((inputs[mine] - net.shifts) / net.scales)
        logits[mine] = found[:, HEADS.index(head)]
    return logits
