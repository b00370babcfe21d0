"""Writes the artefact that serving loads: arrays without pickle, the rest as JSON."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_guard.classifiers.artefact import ARRAYS_FILE, META_FILE
from headrace_guard.classifiers.dense import Dense
from headrace_guard.classifiers.heads import HEADS
from headrace_guard.classifiers.text_model import Point
from headrace_guard_train.cascade_figures import HeadFigures, Stage
from headrace_guard_train.dense_fit import packed
from headrace_guard_train.fit import Fitted
from headrace_guard_train.hazards import Hazards
from headrace_guard_train.operating import FALSE_RATIOS
from headrace_guard_train.rows import HAZARDS
from headrace_guard_train.sources import Source
from headrace_guard_train.topics import Topics
from headrace_guard_train.words_fit import Vocabulary

Json = dict[str, Any]  # Any: JSON


def write(
    folder: Path,
    linear: Mapping[str, Fitted],
    words: tuple[Vocabulary, Dense],
    dense: Dense,
    heads: Mapping[str, HeadFigures],
    hazards: Hazards,
    topics: Topics,
    sources: Sequence[Source],
) -> None:
    """Write both files."""
    folder.mkdir(parents=True, exist_ok=True)
    heads_packed = [_packed(linear[name].weights[:, None]) for name in HEADS]
    hazard_words, hazard_scales = _packed(hazards.words)
    arrays = {
        "linear_weights": np.hstack([weights for weights, _ in heads_packed]),
        "linear_scales": np.concatenate([scale for _, scale in heads_packed]),
        "linear_biases": np.array([linear[name].bias for name in HEADS], np.float32),
        "hazard_words": hazard_words,
        "hazard_scales": hazard_scales,
        "hazard_vectors": hazards.vectors.astype(np.float16),
        "hazard_biases": hazards.biases,
        "topic_centre": topics.centre,
        "word_vectors": words[0].vectors,
        "word_scale": np.float32(words[0].scale),
        **packed(words[1], "words"),
        **packed(dense, "dense"),
    }
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]  # numpy's stub
    data = buffer.getvalue()
    (folder / ARRAYS_FILE).write_bytes(data)
    meta: Json = {
        "arrays_sha256": hashlib.sha256(data).hexdigest(),
        "linear_heads": list(HEADS),
        "heads": {name: _head(heads[name]) for name in HEADS},
        "hazards": list(HAZARDS),
        "topic": _topic(topics),
        "manifest": [vars(source) for source in sources],
    }
    (folder / META_FILE).write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")


def _packed(weights: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return weights as signed bytes with a scale for each column."""
    scales = np.maximum(np.abs(weights).max(axis=0), 1e-9) / 127
    return np.rint(weights / scales).astype(np.int8), scales.astype(np.float32)


def _head(figures: HeadFigures) -> Json:
    return {
        "linear": _stage(figures.linear),
        "cascade": _stage(figures.cascade),
        "words_share": figures.words_share,
        "band_from": min(figures.band_from, 1e9),
        "linear_share": figures.linear_share,
        "has_embedding": bool(np.isfinite(figures.band_from)),
    }


def _stage(stage: Stage) -> Json:
    thresholds = {
        point.value: 0.0 if point is Point.ALL else round(stage.probability(logit), 5)
        for point, logit in stage.logits.items()
    }
    return {"slope": stage.slope, "offset": stage.offset, "thresholds": thresholds}


def _topic(topics: Topics) -> Json:
    def probability(logit: float) -> float:
        return float(1 / (1 + np.exp(-np.clip(topics.slope * logit + topics.offset, -30, 30))))

    thresholds = {
        point.value: 0.0 if point is Point.ALL else round(probability(topics.logits[point]), 5)
        for point in FALSE_RATIOS
    }
    return {"slope": topics.slope, "offset": topics.offset, "thresholds": thresholds}
