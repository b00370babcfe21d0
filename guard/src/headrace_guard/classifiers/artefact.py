"""The shipped models: arrays in ``models.npz`` (no pickle), everything else in ``models.json``.

Both are written by ``python -m headrace_guard_train``. The JSON holds the SHA-256 of the arrays, so
that the two cannot be mixed up, and the manifest of what they were trained on.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_guard.classifiers.dense import Dense
from headrace_guard.classifiers.heads import LinearHeads
from headrace_guard.classifiers.text_model import Point
from headrace_guard.classifiers.words import Words

ARRAYS_FILE, META_FILE = "models.npz", "models.json"


class ArtefactError(Exception):
    """The shipped models cannot be used; the message says why."""


@dataclass(frozen=True)
class Scale:
    """From a head's logit to a probability, and where its operating points lie.

    Args:
        slope: of the logistic calibration.
        offset: of the logistic calibration.
        thresholds: probability from which a text is a hit, by operating point.
    """

    slope: float
    offset: float
    thresholds: Mapping[Point, float]

    def probability(self, logit: float) -> float:
        """Return the calibrated probability."""
        return float(1 / (1 + np.exp(-np.clip(self.slope * logit + self.offset, -30, 30))))


@dataclass(frozen=True)
class HeadModel:
    """What one head needs beside the linear weights.

    Args:
        linear: scale of the linear logit alone.
        cascade: scale of the sum of linear and dense logit.
        words_share: factor of the words stage's logit beside the linear one.
        band_from: sum of both from which the embedding stage is asked.
        linear_share: factor of that sum beside the dense logit.
        has_embedding: whether the head has an embedding stage.
    """

    linear: Scale
    cascade: Scale
    words_share: float
    band_from: float
    linear_share: float
    has_embedding: bool = True


@dataclass(frozen=True)
class Artefact:
    """Everything that was trained.

    Args:
        version: short hash of both files.
        heads: by name.
        linear: the linear heads.
        words: the network that reads what words mean.
        dense: the network that reads what the embedding model says.
        hazards: ids in the order of the hazard models' columns.
        hazard_words: hazard weights over hashed words; one row a bucket.
        hazard_vectors: hazard weights over embeddings; one row a hazard.
        hazard_biases: of both, two rows.
        topic_centre: from where embeddings are seen when topics are judged.
        topic_scale: of the topic score.
    """

    version: str
    heads: Mapping[str, HeadModel]
    linear: LinearHeads
    words: Words
    dense: Dense
    hazards: tuple[str, ...]
    hazard_words: NDArray[np.float32]
    hazard_vectors: NDArray[np.float32]
    hazard_biases: NDArray[np.float32]
    topic_centre: NDArray[np.float32]
    topic_scale: Scale


def load_packaged() -> Artefact:
    """Load the models that are part of this distribution.

    Raises:
        ArtefactError: the files are missing, damaged or of another format.
    """
    folder = resources.files("headrace_guard").joinpath("models")
    try:
        return load(
            folder.joinpath(META_FILE).read_bytes(), folder.joinpath(ARRAYS_FILE).read_bytes()
        )
    except OSError as error:
        raise ArtefactError(f"the packaged models cannot be read: {error}") from error


def load(meta_bytes: bytes, array_bytes: bytes) -> Artefact:
    """Load models from the bytes of the two files.

    Raises:
        ArtefactError: they do not belong together or are of another format.
    """
    try:
        meta = json.loads(meta_bytes)
        if meta["arrays_sha256"] != hashlib.sha256(array_bytes).hexdigest():
            raise ArtefactError(f"{ARRAYS_FILE} is not the file that {META_FILE} describes")
        with np.load(io.BytesIO(array_bytes), allow_pickle=False) as arrays:
            return _artefact(meta, dict(arrays), hashlib.sha256(meta_bytes).hexdigest()[:12])
    except (KeyError, ValueError, TypeError) as error:
        raise ArtefactError(f"the models are of another format: {error!r}") from error


def _artefact(meta: dict[str, Any], arrays: dict[str, Any], version: str) -> Artefact:
    names = meta["linear_heads"]
    linear = LinearHeads(
        arrays["linear_weights"].astype(np.float32) * arrays["linear_scales"],
        arrays["linear_biases"],
        names,
    )
    return Artefact(
        version=version,
        heads={name: _head(meta["heads"][name]) for name in names},
        linear=linear,
        words=Words(
            arrays["word_vectors"],
            float(arrays["word_scale"]),
            unpacked_dense(arrays, names, "words"),
        ),
        dense=unpacked_dense(arrays, names, "dense"),
        hazards=tuple(meta["hazards"]),
        hazard_words=arrays["hazard_words"].astype(np.float32) * arrays["hazard_scales"],
        hazard_vectors=arrays["hazard_vectors"].astype(np.float32),
        hazard_biases=arrays["hazard_biases"],
        topic_centre=arrays["topic_centre"],
        topic_scale=_scale(meta["topic"]),
    )


def unpacked_dense(
    arrays: Mapping[str, Any], names: Sequence[str], prefix: str
) -> Dense:  # Any: arrays
    """Build a network from the arrays of an artefact whose names begin with *prefix*."""
    return Dense(
        tuple(names),
        arrays[f"{prefix}_shifts"],
        arrays[f"{prefix}_scales"],
        arrays[f"{prefix}_inner"].astype(np.float32) * arrays[f"{prefix}_columns"],
        arrays[f"{prefix}_inner_biases"],
        arrays[f"{prefix}_outer"],
        arrays[f"{prefix}_outer_biases"],
    )


def _head(meta: dict[str, Any]) -> HeadModel:
    return HeadModel(
        linear=_scale(meta["linear"]),
        cascade=_scale(meta["cascade"]),
        words_share=float(meta["words_share"]),
        band_from=float(meta["band_from"]),
        linear_share=float(meta["linear_share"]),
        has_embedding=bool(meta["has_embedding"]),
    )


def _scale(meta: dict[str, Any]) -> Scale:
    thresholds = {point: float(meta["thresholds"][point.value]) for point in Point}
    return Scale(float(meta["slope"]), float(meta["offset"]), thresholds)
