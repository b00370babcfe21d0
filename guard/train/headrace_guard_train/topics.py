"""Fits the scale of the topic score over many made-up deployments and says how well it ranks.

A deployment is a domain of questions: 20 of them are the examples, the rest is on topic; questions
of the other domains and ordinary requests are off topic. The domains group the intents of CLINC150.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace_guard.classifiers.text_model import Point
from headrace_guard.classifiers.topic import off_topic_logit
from headrace_guard_train.matrix import Vector
from headrace_guard_train.operating import Scored, auc, calibrate, thresholds
from headrace_guard_train.rows import Row
from headrace_guard_train.states import StateCache

NUM_EXAMPLES = 20
_NUM_SEEDS = 3
_MAX_PER_DOMAIN = 45
_NUM_ORDINARY, _NUM_BACKGROUND = 80, 100
_INTENTS = Path(__file__).parent.parent / "templates" / "topics.toml"
# Topics that the scale is fitted on; the others only judge it.
_FITTED = ("bank", "kitchen", "work", "home")
_ORDINARY = ("own_chat", "own_trigger", "own_sensitive", "safe_prompts", "self_instruct")


@dataclass(frozen=True)
class Topics:
    """The fitted scale and the figures of each domain that it was not fitted on."""

    background: NDArray[np.float32]
    slope: float
    offset: float
    logits: dict[Point, float]
    auc_by_domain: dict[str, tuple[float, float]]
    false_ratio: float
    true_ratio: float


def fit(rows: Sequence[Row], cache: StateCache, seed: int) -> Topics:
    """Fit the scale. `Row.sub` of CLINC150 rows must name the intent."""
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    intents = tomllib.loads(_INTENTS.read_text(encoding="utf-8"))
    domains = {name: _texts(rows, set(names), rng) for name, names in intents.items()}
    ordinary = [row.text for row in rows if row.source in _ORDINARY]
    rng.shuffle(ordinary)
    own = [row.text for row in rows if row.source == "own_chat"]
    background_texts = rng.sample(own, min(_NUM_BACKGROUND, len(own)))
    ordinary = [text for text in ordinary if text not in set(background_texts)][:_NUM_ORDINARY]
    everything = [text for texts in domains.values() for text in texts]
    cache.fill([*everything, *ordinary, *background_texts])
    background = _vectors(background_texts, cache)
    scored = {
        name: _deployments(name, domains, ordinary, background, cache, rng) for name in domains
    }
    fitted = _joined([scored[name] for name in _FITTED])
    judged = _joined([one for name, one in scored.items() if name not in _FITTED])
    slope, offset = calibrate(fitted)
    points = thresholds(fitted)
    return Topics(
        background,
        slope,
        offset,
        points,
        {name: _figures(one) for name, one in scored.items() if name not in _FITTED},
        float(np.mean(judged.logits[judged.clean()] >= points[Point.STRICT])),
        float(np.mean(judged.logits[~judged.clean()] >= points[Point.STRICT])),
    )


def _texts(rows: Sequence[Row], intents: set[str], rng: random.Random) -> list[str]:
    texts = [row.text for row in rows if row.source == "clinc150" and row.sub in intents]
    rng.shuffle(texts)
    return texts[:_MAX_PER_DOMAIN]


def _vectors(texts: Sequence[str], cache: StateCache) -> NDArray[np.float32]:
    return np.array([found.vector for text in texts if (found := cache.get(text)) is not None])


def _deployments(
    name: str,
    domains: dict[str, list[str]],
    ordinary: Sequence[str],
    background: NDArray[np.float32],
    cache: StateCache,
    rng: random.Random,
) -> Scored:
    logits: list[float] = []
    labels: list[int] = []
    sources: list[str] = []
    mine = _vectors(domains[name], cache)
    others = _vectors([t for key, texts in domains.items() if key != name for t in texts], cache)
    far = _vectors(ordinary, cache)
    for _ in range(_NUM_SEEDS):
        order = list(range(len(mine)))
        rng.shuffle(order)
        examples = mine[order[:NUM_EXAMPLES]]
        for group, label, vectors in (
            (name, 0, mine[order[NUM_EXAMPLES:]]), ("domains", 1, others), ("ordinary", 1, far),
        ):  # fmt: skip
            logits += [off_topic_logit(vector, examples, background) for vector in vectors]
            labels += [label] * len(vectors)
            sources += [group] * len(vectors)
    return Scored(np.arange(len(logits)), np.array(sources), np.array(labels), np.array(logits))


def _figures(scored: Scored) -> tuple[float, float]:
    clean = scored.logits[scored.clean()]
    domains = scored.logits[scored.sources == "domains"]
    return auc(domains, clean), auc(scored.logits[scored.sources == "ordinary"], clean)


def _joined(parts: Sequence[Scored]) -> Scored:
    fields: list[Vector | NDArray[np.int64] | NDArray[np.str_]] = [
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("rows", "sources", "labels", "logits")
    ]
    return Scored(*fields)  # type: ignore[arg-type]  # the order of the fields
