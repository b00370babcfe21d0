"""Fitting what judges topics, on made-up embeddings whose geometry is known."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest

from headrace_guard.classifiers.embedding import NUM_DIMENSIONS, Embedded
from headrace_guard.classifiers.text_model import Point
from headrace_guard.classifiers.topic import centred, off_topic_logit
from headrace_guard_train import topics
from headrace_guard_train.rows import CLEAN_REQUEST, Row
from headrace_guard_train.states import StateCache

_DOMAINS = tomllib.loads(
    (Path(topics.__file__).parent.parent / "templates" / "topics.toml").read_text()
)
_A_DOMAIN = 40


class _Embedder:
    """Embeddings that have most in common; a little is their domain's, a little their own."""

    def __init__(self) -> None:
        self._axes = np.eye(NUM_DIMENSIONS, dtype=np.float32)

    def look(self, text: str) -> Embedded:
        """Return the embedding of a text "<direction> <noise>"."""
        direction, noise = map(int, text.split())
        own = np.random.default_rng(noise).normal(size=NUM_DIMENSIONS) / NUM_DIMENSIONS**0.5
        vector = 3 * self._axes[0] + self._axes[1 + direction] + 2 * own
        vector = np.asarray(vector / np.linalg.norm(vector), np.float32)
        return Embedded(vector, vector[np.newaxis])

    def pieces(self, text: str) -> list[int]:
        """Not used here."""
        raise NotImplementedError


@pytest.fixture
def fitted(tmp_path: Path) -> tuple[topics.Topics, _Embedder]:
    """Seven domains, as many other intents, ordinary requests."""
    rows = [
        Row(f"{n} {1000 * n + idx}", "clinc150", CLEAN_REQUEST, sub=intents[idx % len(intents)])
        for n, intents in enumerate(_DOMAINS.values())
        for idx in range(_A_DOMAIN)
    ]
    rows += [
        Row(f"{7 + n} {10_000 + 1000 * n + idx}", "clinc150", CLEAN_REQUEST, sub=f"other_{n}")
        for n in range(6)
        for idx in range(20)
    ]
    rows += [Row(f"{20 + n % 9} {30_000 + n}", "self_instruct", CLEAN_REQUEST) for n in range(500)]
    embedder = _Embedder()
    return topics.fit(rows, StateCache(tmp_path / "states.npz", embedder), 7), embedder


def test_domains_that_were_left_out_are_told_apart(
    fitted: tuple[topics.Topics, _Embedder],
) -> None:
    """By what they do not share with everybody; thresholds of others hold for them."""
    found, _ = fitted
    assert set(found.auc) == set(_DOMAINS)
    for row in found.auc.values():
        assert set(row) == set(topics.OFF_TOPIC)
        assert min(row.values()) > 0.95
    assert found.false_ratio < 0.15
    assert found.true_ratio > 0.8


def test_what_is_shipped_judges_a_new_topic(fitted: tuple[topics.Topics, _Embedder]) -> None:
    """The centre lies where all have something; a topic of no domain has its own side of it."""
    found, embedder = fitted
    assert int(np.argmax(found.centre)) == 0

    def seen(direction: int, noise: int) -> np.ndarray:
        return centred(embedder.look(f"{direction} {noise}").vector, found.centre)

    examples = np.array([seen(50, 40_000 + n) for n in range(topics.NUM_EXAMPLES)])
    level = found.logits[Point.STRICT]
    on_topic = [off_topic_logit(seen(50, 41_000 + n), examples) for n in range(50)]
    off_topic = [off_topic_logit(seen(51, 42_000 + n), examples) for n in range(50)]
    assert np.mean(np.array(on_topic) < level) > 0.85
    assert np.mean(np.array(off_topic) >= level) > 0.8
    assert found.slope > 0


def test_what_judges_a_domain_has_not_learnt_it() -> None:
    """Nor what is off topic there."""
    axes = np.eye(4, dtype=np.float32)
    questions = topics._Questions(
        {"a": axes[:1], "b": axes[1:2], "c": axes[2:3]}, axes[3:], {"ordinary": axes[3:]}
    )
    assert questions.centre(("a", "c")).tolist() == [0, 0.5, 0, 0.5]
    assert questions.centre().tolist() == [0.25] * 4
