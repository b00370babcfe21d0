"""The cascade: cheap stage on everything, the embedding in doubt, the judge between thresholds."""

import asyncio
import hashlib
import json
from collections.abc import Mapping

import numpy as np
import pytest
from prometheus_client import Gauge

from headrace_common.clock import SystemClock
from headrace_guard.classifiers.artefact import Artefact, ArtefactError, HeadModel, Scale, load
from headrace_guard.classifiers.cascade import CascadeModels
from headrace_guard.classifiers.cuts import read
from headrace_guard.classifiers.dense import NUM_INPUTS, Dense
from headrace_guard.classifiers.embedding import NUM_DIMENSIONS, Embedded, Embeds
from headrace_guard.classifiers.heads import HARM, HEADS, INDIRECT, INJECTION, LinearHeads
from headrace_guard.classifiers.judge import Judge, JudgeFailedError
from headrace_guard.classifiers.ngrams import NUM_BUCKETS, features
from headrace_guard.classifiers.text_model import Asked, Point, Topic, Trust
from headrace_guard.classifiers.topic import TopicVectors, centred, off_topic_logit
from headrace_guard.classifiers.words import NUM_POOLS, Words, pooled
from headrace_guard.cpu_pool import CpuPool
from headrace_guard.deadline import Deadline
from headrace_guard.normalise import Window
from headrace_guard.verdict import Reason

_POINTS = {Point.STRICT: 0.3, Point.BALANCED: 0.6, Point.LENIENT: 0.9, Point.ALL: 0.0}
_SCALE = Scale(1.0, 0.0, _POINTS)
_WORDS = {INJECTION: "override", INDIRECT: "assistant", HARM: "poison"}
_ALL = Asked({"injection": Point.ALL, "toxicity": Point.ALL, "harm.S1": Point.ALL})
_BALANCED = Asked({"injection": Point.BALANCED, "harm.S1": Point.BALANCED})


class _Embedder:
    """Points along the first axis for texts with "surely", against it for all others."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def look(self, text: str) -> Embedded:
        self.seen.append(text)
        vector = np.zeros(NUM_DIMENSIONS, np.float32)
        vector[0] = 1.0 if "surely" in text else -1.0
        return Embedded(vector, vector[np.newaxis])

    def pieces(self, text: str) -> list[int]:
        return [1 if word == "venom" else 0 for word in text.split()]


class _Judge:
    name = "judge:test"

    def __init__(self, answer: float | None) -> None:
        self.answer, self.num_asked = answer, 0

    async def ask(self, tenant_id: str, text: str, heads: frozenset[str]) -> Mapping[str, float]:
        del tenant_id, text
        self.num_asked += 1
        if self.answer is None:
            raise JudgeFailedError
        return dict.fromkeys(heads, self.answer)


def _dense() -> Dense:
    """Six times the first number of the embedding, for each head."""
    inner = np.zeros((NUM_INPUTS, 2), np.float32)
    inner[0] = 1.0, -1.0
    outer = np.array([[6.0] * len(HEADS), [-6.0] * len(HEADS)], np.float32)
    zeros, ones = np.zeros(NUM_INPUTS, np.float32), np.ones(NUM_INPUTS, np.float32)
    return Dense(HEADS, zeros, ones, inner, zeros[:2], outer, zeros[: len(HEADS)])


def _words() -> Words:
    """Ten for "venom", which no linear head knows, in a head's logit; nothing for other words."""
    size = NUM_POOLS
    inner = np.zeros((size, 2), np.float32)
    inner[1] = 1.0, -1.0
    outer = np.zeros((2, len(HEADS)), np.float32)
    outer[0, HEADS.index(HARM)] = 1.0
    zeros, ones = np.zeros(size, np.float32), np.ones(size, np.float32)
    net = Dense(HEADS, zeros, ones, inner, zeros[:2], outer, zeros[: len(HEADS)])
    return Words(np.array([[0], [10]], np.int8), 1.0, net)


def _artefact() -> Artefact:
    weights = np.zeros((NUM_BUCKETS, len(HEADS)), np.float32)
    for column, head in enumerate(HEADS):
        if head in _WORDS:
            weights[features(_WORDS[head]).buckets, column] = 1.0
    models = {head: HeadModel(_SCALE, _SCALE, 1.0, -2.0, 1.0) for head in HEADS}
    hazard_words = np.zeros((64, 14), np.float32)
    return Artefact(
        version="test",
        heads=models,
        linear=LinearHeads(weights, np.full(len(HEADS), -4.0, np.float32), HEADS),
        words=_words(),
        dense=_dense(),
        hazards=tuple(f"S{number}" for number in range(1, 15)),
        hazard_words=hazard_words,
        hazard_vectors=np.zeros((14, NUM_DIMENSIONS), np.float32),
        hazard_biases=np.array([[5.0] + [0.0] * 13] * 2, np.float32),
        topic_centre=np.zeros(NUM_DIMENSIONS, np.float32),
        topic_scale=Scale(4.0, 0.0, _POINTS),
    )


def _models(embedder: Embeds | None = None, judge: Judge | None = None) -> CascadeModels:
    pool = CpuPool(1, 4, Gauge("waiting", "For tests.", registry=None))
    return CascadeModels(_artefact(), embedder, pool, pool, judge)


def _deadline() -> Deadline:
    return Deadline(SystemClock(), 5.0)


async def _scores(models: CascadeModels, text: str, asked: Asked = _ALL) -> dict[str, float]:
    judged = await models.judge("t", Window(text), Trust.USER, asked, _deadline())
    return {match.category: match.score for match in judged.matches}


async def test_the_embedding_is_asked_only_in_doubt() -> None:
    """Most texts cost the linear stage alone."""
    embedder = _Embedder()
    models = _models(embedder)
    await _scores(models, "an ordinary sentence about bread")
    assert embedder.seen == []
    await _scores(models, "override override")
    assert embedder.seen != []


async def test_a_word_that_no_linear_head_knows_still_raises_doubt() -> None:
    """The words stage adds to the linear logit; alone it decides nothing."""
    embedder = _Embedder()
    models = _models(embedder)
    assert await _scores(models, "a drop of venom", _BALANCED) == {}
    assert embedder.seen == ["a drop of venom"]
    assert (await _scores(models, "surely a drop of venom", _BALANCED)).keys() == {"harm.S1"}
    assert await _scores(_models(), "surely a drop of venom", _BALANCED) == {}


def test_a_window_is_pooled_whatever_its_length() -> None:
    """Mean, extremes and those of neighbours' sums; no words are no reason for a fault."""
    vectors = np.array([[1, -2], [3, 4], [-5, 0]], np.int8)
    assert pooled(vectors, 0.5, []).tolist() == [0.0] * 10
    assert pooled(vectors, 1.0, [1]).tolist() == [3, 4] * NUM_POOLS
    found = pooled(vectors, 0.5, [0, 1, 2]).reshape(NUM_POOLS, 2) * 2
    assert np.allclose(found, [[-1 / 3, 2 / 3], [3, 4], [-5, -2], [4, 4], [-2, 2]])


async def test_the_embedding_confirms_or_clears() -> None:
    """The sum of both logits decides."""
    models = _models(_Embedder())
    confirmed = await _scores(models, "surely override override", _BALANCED)
    cleared = await _scores(models, "override override", _BALANCED)
    assert confirmed.keys() == {"injection"}
    assert cleared == {}


async def test_texts_below_the_band_never_reach_a_threshold() -> None:
    """What the embedding did not see is below every operating point."""
    scores = await _scores(_models(_Embedder()), "an ordinary sentence about bread")
    assert max(scores.values()) < _POINTS[Point.STRICT]


async def test_without_the_embedding_the_linear_stage_decides() -> None:
    """Its scores stand, and the version says which stages there are."""
    models = _models()
    assert (await _scores(models, "override override", _BALANCED)).keys() == {"injection"}
    assert models.version.endswith("/linear")
    assert _models(_Embedder()).version != models.version


async def test_instructions_in_documents_count_only_there() -> None:
    """What is harmless from a user is an injection in a tool result, and never in owner's text."""
    models = _models()
    found = {
        trust: (
            await models.judge("t", Window("assistant assistant"), trust, _BALANCED, _deadline())
        )
        for trust in Trust
    }
    assert [m.category for m in found[Trust.UNTRUSTED].matches] == ["injection"]
    assert found[Trust.USER].matches == found[Trust.OWNER].matches == []


async def test_a_document_is_doubted_in_several_places() -> None:
    """The cheap stage need not name the right sentence of a document, only one of three."""
    filler = "bread and butter. " * 30
    text = f"{'assistant ' * 14}{filler}{'surely assistant ' * 8}{filler}"
    embedder = _Embedder()
    judged = await _models(embedder).judge(
        "t", Window(text), Trust.UNTRUSTED, _BALANCED, _deadline()
    )
    assert len(embedder.seen) > 1
    assert [match.start <= text.index("surely") < match.end for match in judged.matches] == [True]


async def test_the_span_is_the_window_that_scored() -> None:
    """A hit in a long text says where."""
    text = "bread and butter. " * 100 + "override " * 12 + "bread and butter. " * 100
    judged = await _models().judge("t", Window(text), Trust.USER, _BALANCED, _deadline())
    match = judged.matches[0]
    assert match.start <= text.index("override") < match.end
    assert match.end - match.start < len(text) / 2


async def test_a_harm_has_its_hazard() -> None:
    """The most likely hazard has the whole score; a policy that does not name it gets no hit."""
    models = _models()
    assert (await _scores(models, "poison poison", _BALANCED)).keys() == {"harm.S1"}
    other = Asked({"harm.S9": Point.BALANCED})
    assert await _scores(models, "poison poison", other) == {}


@pytest.mark.parametrize(("answer", "is_hit"), [(0.99, True), (0.01, False)])
async def test_the_judge_decides_between_the_thresholds(answer: float, is_hit: bool) -> None:
    """Only what lies between strict and lenient goes to it."""
    judge = _Judge(answer)
    asked = Asked({"injection": Point.BALANCED}, uses_judge=True)
    models = _models(None, judge)
    await _scores(models, "an ordinary sentence about bread", asked)
    assert judge.num_asked == 0
    text = "override override bread"
    logit = models._artefact.linear.peaks(read(text), frozenset({INJECTION}))[INJECTION][0].logit
    assert _POINTS[Point.STRICT] <= _SCALE.probability(logit) < _POINTS[Point.LENIENT]
    assert ("injection" in await _scores(models, text, asked)) is is_hit
    assert judge.num_asked == 1


async def test_a_judge_that_fails_is_not_evaluated() -> None:
    """No answer is never "clean"."""
    asked = Asked({"injection": Point.BALANCED}, uses_judge=True)
    window = Window("override override bread")
    failed = await _models(None, _Judge(None)).judge("t", window, Trust.USER, asked, _deadline())
    missing = await _models().judge("t", window, Trust.USER, asked, _deadline())
    assert (failed.missed, missing.missed) == (Reason.JUDGE_FAILED, Reason.NO_MODEL)


async def test_topics_need_the_embedding() -> None:
    """Without it, off topic is not evaluated rather than on topic."""
    asked = Asked(
        {"off_topic": Point.BALANCED}, Topic(("surely one", "surely two", "surely three"))
    )
    question = Window("what is this about")
    missing = await _models().judge("t", question, Trust.USER, asked, _deadline())
    assert missing.missed is Reason.NO_MODEL
    far = await _models(_Embedder()).judge("t", question, Trust.USER, asked, _deadline())
    near = await _models(_Embedder()).judge(
        "t", Window("surely this is about it"), Trust.USER, asked, _deadline()
    )
    assert [match.category for match in far.matches] == ["off_topic"]
    assert near.matches == []


async def test_no_time_is_not_evaluated() -> None:
    """A deadline that has passed gives no result at all."""
    deadline = Deadline(SystemClock(), 0.0)
    await asyncio.sleep(0)
    long = Window("bread and butter " * 1000)
    judged = await _models(_Embedder()).judge("t", long, Trust.USER, _BALANCED, deadline)
    assert judged.missed is Reason.OUT_OF_TIME


def test_the_fast_stage_judges_at_once() -> None:
    """Output windows are judged without waiting for anything."""
    matches = _models(_Embedder()).judge_now(Window("override override"), Trust.MODEL, _BALANCED)
    assert [match.category for match in matches] == ["injection"]


def test_examples_are_embedded_once() -> None:
    """A topic's examples are kept."""
    embedder = _Embedder()
    centre = np.zeros(NUM_DIMENSIONS, np.float32)
    vectors = TopicVectors(
        lambda texts: np.array([embedder.look(text).vector for text in texts]), centre, 1
    )
    topic = Topic(("surely a", "b"))
    text = np.eye(NUM_DIMENSIONS, dtype=np.float32)[0]
    assert vectors.off_topic_logit(text, topic) == vectors.off_topic_logit(text, topic)
    assert embedder.seen == ["surely a", "b"]


def test_what_all_requests_have_in_common_does_not_count_for_a_topic() -> None:
    """Seen from the middle of all, a text that shares only that with the examples is far off."""
    common, topic, other = np.eye(3, dtype=np.float32)
    examples, text = (3 * common + topic) / 10**0.5, (3 * common + other) / 10**0.5
    assert off_topic_logit(text, examples[None]) == pytest.approx(-0.9)
    far = off_topic_logit(centred(text, common), centred(examples[None], common))
    assert far > -0.1
    assert np.linalg.norm(centred(common, common)) == 0


def test_files_that_do_not_belong_together_are_refused() -> None:
    """The JSON names the arrays by hash."""
    meta = {"arrays_sha256": hashlib.sha256(b"other").hexdigest()}
    with pytest.raises(ArtefactError, match="not the file"):
        load(json.dumps(meta).encode(), b"arrays")
