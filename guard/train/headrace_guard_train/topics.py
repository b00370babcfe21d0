"""Fits what judges topics, over made-up deployments, and says how well it ranks.

A deployment is a domain of questions: 20 of them are the examples, the rest is on topic. Off topic
are questions of other domains, what people else ask assistants, and ordinary requests. The domains
group the intents of CLINC150; the intents of none are what people else ask.

Three things are fitted: the centre from where embeddings are seen, which is the mean of questions
of all these kinds; the scale; the thresholds. Whatever judges a deployment has its centre from
texts of neither its domain nor the two that are off topic there, and no text that it judges.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace_guard.classifiers.text_model import Point
from headrace_guard.classifiers.topic import centred, off_topic_logit
from headrace_guard_train.matrix import Vector
from headrace_guard_train.operating import Scored, auc, calibrate, only, thresholds
from headrace_guard_train.rows import Row
from headrace_guard_train.states import StateCache

NUM_EXAMPLES = 20
_NUM_SEEDS = 3
_MAX_PER_DOMAIN = 120
_NUM_OTHER, _NUM_ORDINARY = 240, 240
_INTENTS = Path(__file__).parent.parent / "templates" / "topics.toml"
_ORDINARY = ("own_chat", "own_trigger", "own_sensitive", "safe_prompts", "self_instruct")
# What is off topic, as `Scored.sources` names it.
OFF_TOPIC = ("other domains", "other requests", "ordinary")
Embeddings = NDArray[np.float32]


@dataclass(frozen=True)
class Topics:
    """What is fitted, and the figures of each domain.

    `auc` is by domain and kind of what is off topic; `false_ratio` and `true_ratio` are hits at
    `strict` by thresholds of the other domains, all domains alike.
    """

    centre: Embeddings
    slope: float
    offset: float
    logits: dict[Point, float]
    auc: dict[str, dict[str, float]]
    false_ratio: float
    true_ratio: float


@dataclass(frozen=True)
class _Questions:
    """Embeddings, one row a text: by domain; and of those of none, to learn from and to judge."""

    domains: Mapping[str, Embeddings]
    learnt: Embeddings
    judged: Mapping[str, Embeddings]

    def centre(self, left_out: Sequence[str] = ()) -> Embeddings:
        """Return the mean of what is not left out."""
        kept = [found for name, found in self.domains.items() if name not in left_out]
        return np.asarray(np.concatenate([self.learnt, *kept]).mean(axis=0), np.float32)


def fit(rows: Sequence[Row], cache: StateCache, seed: int) -> Topics:
    """Fit all of it. `Row.sub` of CLINC150 rows must name the intent."""
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    questions = _questions(rows, cache, rng)
    names = list(questions.domains)
    scored = {
        # The third and the fifth from here on: seldom of one kind, each left out with each once.
        name: _deployments(
            questions, name, (names[n - len(names) + 2], names[n - len(names) + 4]), rng
        )
        for n, name in enumerate(names)
    }
    everything = _joined(list(scored.values()))
    slope, offset = calibrate(everything)
    hits = [_hits_at_strict(scored, name) for name in names]
    return Topics(
        questions.centre(),
        slope,
        offset,
        thresholds(everything),
        {name: _figures(one) for name, one in scored.items()},
        float(np.mean([false for false, _ in hits])),
        float(np.mean([true for _, true in hits])),
    )


def _questions(rows: Sequence[Row], cache: StateCache, rng: random.Random) -> _Questions:
    intents = tomllib.loads(_INTENTS.read_text(encoding="utf-8"))
    asked = [row for row in rows if row.source == "clinc150"]
    texts = {name: _drawn(asked, set(mine), _MAX_PER_DOMAIN, rng) for name, mine in intents.items()}
    others = sorted({row.sub for row in asked} - {it for mine in intents.values() for it in mine})
    # By intent, so that what judges is not what was learnt in other words.
    halves = [_drawn(asked, set(others[n::2]), _NUM_OTHER, rng) for n in range(2)]
    plain = [row.text for row in rows if row.source in _ORDINARY]
    rng.shuffle(plain)
    ordinary = plain[:_NUM_ORDINARY], plain[_NUM_ORDINARY : 2 * _NUM_ORDINARY]
    cache.fill([text for some in (*texts.values(), *halves, *ordinary) for text in some])
    return _Questions(
        {name: _vectors(some, cache) for name, some in texts.items()},
        _vectors([*halves[0], *ordinary[0]], cache),
        {"other requests": _vectors(halves[1], cache), "ordinary": _vectors(ordinary[1], cache)},
    )


def _drawn(rows: Sequence[Row], intents: set[str], most: int, rng: random.Random) -> list[str]:
    texts = [row.text for row in rows if row.sub in intents]
    rng.shuffle(texts)
    return texts[:most]


def _vectors(texts: Sequence[str], cache: StateCache) -> Embeddings:
    return np.array([found.vector for text in texts if (found := cache.get(text)) is not None])


def _deployments(
    questions: _Questions, name: str, others: Sequence[str], rng: random.Random
) -> Scored:
    centre = questions.centre((name, *others))
    mine = centred(questions.domains[name], centre)
    off_topic = {
        "other domains": np.concatenate([questions.domains[it] for it in others]),
        **questions.judged,
    }
    logits: list[float] = []
    labels: list[int] = []
    sources: list[str] = []
    for _ in range(_NUM_SEEDS):
        order = list(range(len(mine)))
        rng.shuffle(order)
        examples = mine[order[:NUM_EXAMPLES]]
        groups = {name: mine[order[NUM_EXAMPLES:]]}
        groups |= {kind: centred(vectors, centre) for kind, vectors in off_topic.items()}
        for group, vectors in groups.items():
            logits += [off_topic_logit(vector, examples) for vector in vectors]
            labels += [int(group != name)] * len(vectors)
            sources += [group] * len(vectors)
    return Scored(np.arange(len(logits)), np.array(sources), np.array(labels), np.array(logits))


def _figures(scored: Scored) -> dict[str, float]:
    clean = scored.logits[scored.clean()]
    return {kind: auc(scored.logits[scored.sources == kind], clean) for kind in OFF_TOPIC}


def _hits_at_strict(scored: Mapping[str, Scored], name: str) -> tuple[float, float]:
    """Return the shares of what is on and what is off topic that thresholds of others hit."""
    level = thresholds(_joined([it for key, it in scored.items() if key != name]))[Point.STRICT]
    one = scored[name]
    off_topic = [only(one, one.sources == kind).logits for kind in OFF_TOPIC]
    return (
        float(np.mean(one.logits[one.clean()] >= level)),
        float(np.mean([np.mean(logits >= level) for logits in off_topic])),
    )


def _joined(parts: Sequence[Scored]) -> Scored:
    fields: list[Vector | NDArray[np.int64] | NDArray[np.str_]] = [
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("rows", "sources", "labels", "logits")
    ]
    return Scored(*fields)  # type: ignore[arg-type]  # the order of the fields
