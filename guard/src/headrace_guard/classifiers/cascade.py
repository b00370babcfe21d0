"""The trained classifiers as one: cheap linear heads on every text, an embedding where those doubt.

::

    linear + words < band -----------------------------> low score, done (most texts)
                  >= band --> embedding and dense stage, at most three windows --> sum of logits
                                   score between two thresholds and a judge --> its word decides

Without the embedding model there are no word pieces either: the linear logit is scored on a scale
and thresholds of its own; the version says so. A stage that was due and gave nothing is
`Judged.missed`, never a low score; of more than three windows that are doubted, which only a
document can have, the least suspicious do not count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from headrace_common.fair_places import NoPlaceError
from headrace_guard.canonical import canonical_strings
from headrace_guard.classifiers.artefact import Artefact, HeadModel
from headrace_guard.classifiers.base import Match
from headrace_guard.classifiers.cuts import Reading, read_all
from headrace_guard.classifiers.embedding import Embeds
from headrace_guard.classifiers.heads import HARM, INDIRECT, INJECTION, TOXICITY, Peak
from headrace_guard.classifiers.judge import Judge, JudgeFailedError
from headrace_guard.classifiers.ngrams import features
from headrace_guard.classifiers.text_model import (
    HARMS,
    OFF_TOPIC,
    Asked,
    Judged,
    Point,
    Trust,
)
from headrace_guard.classifiers.topic import TopicVectors
from headrace_guard.cpu_pool import INLINE_CHARS, CpuPool
from headrace_guard.deadline import Deadline
from headrace_guard.normalise import Window
from headrace_guard.verdict import Reason

MAX_WINDOWS = 3
# Shorter texts ("yes", "and then?") say nothing about a topic.
MIN_TOPIC_WORDS = 3
_MAX_TOPICS = 64
Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Seen:
    """One of a head's highest windows and where it stands."""

    head: str
    peak: Peak
    reading: Reading
    # What both cheap stages say together; the linear one alone without the other.
    cheap: float

    @property
    def text(self) -> str:
        return self.reading.text[self.peak.begin : self.peak.end]


@dataclass(frozen=True, slots=True)
class _Looked:
    """What the embedding stage says of a window: its embedding, a logit a head."""

    vector: Vector
    logits: Mapping[str, float]


@dataclass(slots=True)
class _Scored:
    """What a head says of a text in the end."""

    seen: _Seen
    probability: float
    vector: Vector | None
    stage: str
    thresholds: Mapping[Point, float]
    # With each one's share of the probability; made on demand.
    categories: list[tuple[str, float]] | None = None


class CascadeModels:
    """All trained classifiers.

    Args:
        artefact: what was trained.
        embedder: the embedding model; None = not installed.
        threads: where long texts are scored.
        embed_thread: one thread, where embeddings are made.
        judge: whom to ask where a policy wants that; None = nobody.
    """

    def __init__(
        self,
        artefact: Artefact,
        embedder: Embeds | None,
        threads: CpuPool,
        embed_thread: CpuPool,
        judge: Judge | None = None,
    ) -> None:
        self._artefact, self._embedder, self._judge = artefact, embedder, judge
        self._threads, self._embed_thread = threads, embed_thread
        stages = "linear" if embedder is None else "linear+minilm"
        self.version = f"{artefact.version}/{stages}" + (f"+{judge.name}" if judge else "")
        if embedder is not None:
            self._topics = TopicVectors(
                lambda texts: np.array([embedder.look(text).vector for text in texts]),
                artefact.topic_centre,
                _MAX_TOPICS,
            )

    async def judge(
        self, tenant_id: str, window: Window, trust: Trust, asked: Asked, deadline: Deadline
    ) -> Judged:
        """Judge a tenant's text with every stage that it needs."""
        try:
            async with asyncio.timeout(deadline.left_s()):
                return await self._judge_stages(tenant_id, window.text, trust, asked)
        except NoPlaceError:
            return Judged(missed=Reason.OVERLOADED)
        except TimeoutError:
            return Judged(missed=Reason.OUT_OF_TIME)

    def judge_now(self, window: Window, trust: Trust, asked: Asked) -> list[Match]:
        """Judge a text with the linear heads alone, on their own thresholds."""
        seen = self._look(window.text, _heads(trust, asked), has_words=False)
        return self._matches([self._linear(one) for one in seen], asked)

    async def _judge_stages(self, tenant_id: str, text: str, trust: Trust, asked: Asked) -> Judged:
        seen = await self._look_cheaply(tenant_id, text, _heads(trust, asked))
        has_topic = OFF_TOPIC in asked.points and asked.topic is not None and trust is Trust.USER
        whole = _topic_text(text) if has_topic else None
        looked, off_topic = await self._look_closely(tenant_id, self._doubts(seen), whole, asked)
        scored = [self._score(one, looked) for one in seen]
        missed = Reason.NO_MODEL if has_topic and self._embedder is None else None
        if asked.uses_judge:
            missed = await self._ask_judge(tenant_id, scored, text) or missed
        matches = self._matches(scored, asked)
        if off_topic is not None:
            matches += self._off_topic(off_topic, len(text), asked)
        return Judged(matches, missed, self._balanced(scored, asked))

    async def _look_cheaply(self, tenant_id: str, text: str, heads: frozenset[str]) -> list[_Seen]:
        """Ask the linear heads, and the words where there are word pieces."""
        if not heads:
            return []
        look = partial(self._look, text, heads, has_words=self._embedder is not None)
        # Rules have read it just now: a short text goes on in the same turn of the loop.
        if len(text) <= INLINE_CHARS:
            return look()
        return await self._threads.run(tenant_id, len(text), look, goes_on=True)

    async def _look_closely(
        self, tenant_id: str, doubts: list[_Seen], whole: str | None, asked: Asked
    ) -> tuple[dict[str, _Looked], float | None]:
        """Ask the embedding stage of each doubted window, and how far off its topic a text is."""
        texts = list(dict.fromkeys(one.text for one in doubts))
        # Each is one run of the model, cut to what it reads.
        num_runs = len(texts) + (whole is not None)
        if self._embedder is None or num_runs == 0:
            return {}, None
        return await self._embed_thread.run(
            tenant_id, num_runs, lambda: self._embed(texts, whole, asked)
        )

    def _look(self, text: str, heads: frozenset[str], *, has_words: bool) -> list[_Seen]:
        return [seen for one in read_all(text) for seen in self._look_at(one, heads, has_words)]

    def _look_at(self, reading: Reading, heads: frozenset[str], has_words: bool) -> list[_Seen]:
        peaks = self._artefact.linear.peaks(reading, heads)
        places = {(one.begin, one.end) for found in peaks.values() for one in found}
        said = self._words(reading, sorted(places)) if has_words and places else {}
        return [
            _Seen(head, peak, reading, self._cheap(head, peak, said))
            for head, found in peaks.items()
            for peak in found
        ]

    def _words(
        self, reading: Reading, places: list[tuple[int, int]]
    ) -> dict[tuple[int, int], dict[str, float]]:
        assert self._embedder is not None  # noqa: S101 - for the type checker; the caller looked
        windows = [self._embedder.pieces(reading.text[begin:end]) for begin, end in places]
        return dict(zip(places, self._artefact.words.all_logits(windows), strict=True))

    def _cheap(
        self, head: str, peak: Peak, said: Mapping[tuple[int, int], Mapping[str, float]]
    ) -> float:
        if not said:
            return peak.logit
        share = self._artefact.heads[head].words_share
        return peak.logit + share * said[peak.begin, peak.end][head]

    def _doubts(self, seen: list[_Seen]) -> list[_Seen]:
        """Return what the embedding stage should look at, most suspicious first."""
        heads = self._artefact.heads
        doubts = [
            (one.cheap - heads[one.head].band_from, one)
            for one in seen
            if one.cheap >= heads[one.head].band_from and heads[one.head].has_embedding
        ]
        return [one for _, one in sorted(doubts, key=lambda pair: -pair[0])[:MAX_WINDOWS]]

    def _embed(
        self, texts: list[str], whole: str | None, asked: Asked
    ) -> tuple[dict[str, _Looked], float | None]:
        assert self._embedder is not None  # noqa: S101 - for the type checker; the caller looked
        looked: dict[str, _Looked] = {}
        for text in texts:
            embedded = self._embedder.look(text)
            looked[text] = _Looked(embedded.vector, self._artefact.dense.logits(embedded))
        if whole is None or asked.topic is None:
            return looked, None
        vector = self._embedder.look(whole).vector
        return looked, self._topics.off_topic_logit(vector, asked.topic)

    def _score(self, seen: _Seen, looked: Mapping[str, _Looked]) -> _Scored:
        if self._embedder is None:
            return self._linear(seen)
        model = self._artefact.heads[seen.head]
        if not model.has_embedding:
            return self._linear(seen)
        found = looked.get(seen.text) if seen.cheap >= model.band_from else None
        if found is None:
            return _Scored(seen, _below_band(model, seen), None, "linear", model.cascade.thresholds)
        logit = model.linear_share * seen.cheap + found.logits[seen.head] - seen.peak.margin
        probability = model.cascade.probability(logit)
        return _Scored(seen, probability, found.vector, "cascade", model.cascade.thresholds)

    def _linear(self, seen: _Seen) -> _Scored:
        scale = self._artefact.heads[seen.head].linear
        return _Scored(seen, scale.probability(seen.peak.logit), None, "linear", scale.thresholds)

    async def _ask_judge(self, tenant_id: str, scored: list[_Scored], text: str) -> Reason | None:
        doubts = [
            one
            for one in scored
            if one.thresholds[Point.STRICT] <= one.probability < one.thresholds[Point.LENIENT]
        ]
        if not doubts:
            return None
        if self._judge is None:
            return Reason.NO_MODEL
        try:
            found = await self._judge.ask(
                tenant_id, text, frozenset(one.seen.head for one in doubts)
            )
        except JudgeFailedError:
            return Reason.JUDGE_FAILED
        for one in doubts:
            one.probability, one.stage = found[one.seen.head], "judge"
        return None

    def _matches(self, scored: list[_Scored], asked: Asked) -> list[Match]:
        matches: dict[str, Match] = {}
        points = frozenset(asked.points.values())
        for one in scored:
            if not _may_hit(one, points):
                continue
            for category, share in self._categories(one):
                point = asked.points.get(category)
                if point is None:
                    continue
                score = one.probability * share
                is_hit = point is Point.ALL or score >= one.thresholds[point]
                if is_hit and (category not in matches or score > matches[category].score):
                    matches[category] = self._match(one, category, score)
        return sorted(matches.values())

    def _balanced(self, scored: list[_Scored], asked: Asked) -> frozenset[str]:
        return frozenset(
            category
            for one in scored
            if one.probability >= one.thresholds[Point.BALANCED]
            for category, share in self._categories(one)
            if category in asked.points
            and one.probability * share >= one.thresholds[Point.BALANCED]
        )

    def _match(self, scored: _Scored, category: str, score: float) -> Match:
        seen = scored.seen
        start, end = seen.reading.span(seen.peak.begin, seen.peak.end)
        detector = f"{scored.stage}.{seen.head}/{self.version}"
        return Match(start, end, category, detector, score, start)

    def _categories(self, scored: _Scored) -> list[tuple[str, float]]:
        if scored.categories is None:
            scored.categories = self._shared_out(scored)
        return scored.categories

    def _shared_out(self, scored: _Scored) -> list[tuple[str, float]]:
        head = scored.seen.head
        if head == TOXICITY:
            return [(TOXICITY, 1.0)]
        if head in (INJECTION, INDIRECT):
            return [(INJECTION, 1.0)]
        shares = self._hazard_shares(scored)
        return [(f"harm.{hazard}", share) for hazard, share in shares.items()]

    def _hazard_shares(self, scored: _Scored) -> dict[str, float]:
        """Return how much each hazard is meant, the most likely one as 1."""
        artefact = self._artefact
        if scored.vector is not None:
            logits = artefact.hazard_vectors @ scored.vector + artefact.hazard_biases[1]
        else:
            found = features(scored.seen.text).buckets % len(artefact.hazard_words)
            gained = artefact.hazard_words[found].sum(axis=0)
            logits = gained / np.sqrt(max(len(found), 1)) + artefact.hazard_biases[0]
        shares = np.exp(logits - logits.max())
        return dict(zip(artefact.hazards, shares.tolist(), strict=True))

    def _off_topic(self, logit: float, num_chars: int, asked: Asked) -> list[Match]:
        scale = self._artefact.topic_scale
        score, point = scale.probability(logit), asked.points[OFF_TOPIC]
        if point is not Point.ALL and score < scale.thresholds[point]:
            return []
        return [Match(0, num_chars, OFF_TOPIC, f"embedding.topic/{self.version}", score, 0)]


def _may_hit(scored: _Scored, points: frozenset[Point]) -> bool:
    """Whether a text can reach any point asked for; most do not, and need no hazard told."""
    return Point.ALL in points or any(
        scored.probability >= scored.thresholds[point] for point in points
    )


def _topic_text(text: str) -> str | None:
    """Return what may be about a topic; None = it says too little."""
    strings = canonical_strings(text) if '"' in text else None
    said = text if strings is None else strings.text
    return said if len(said.split()) >= MIN_TOPIC_WORDS else None


def _heads(trust: Trust, asked: Asked) -> frozenset[str]:
    heads: set[str] = set()
    if INJECTION in asked.points and trust is not Trust.OWNER:
        heads.add(INJECTION)
        if trust is Trust.UNTRUSTED:
            heads.add(INDIRECT)
    if any(category in asked.points for category in HARMS):
        heads.add(HARM)
    if TOXICITY in asked.points:
        heads.add(TOXICITY)
    return frozenset(heads)


def _below_band(model: HeadModel, seen: _Seen) -> float:
    # Texts that the embedding never saw stay below every hit, in the order of their linear scores.
    logit = min(seen.cheap, model.band_from)
    edge = max(model.linear.probability(model.band_from), 1e-9)
    return 0.5 * model.cascade.thresholds[Point.STRICT] * model.linear.probability(logit) / edge
