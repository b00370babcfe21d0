"""Trains the dense stage, judges all stages and writes the models and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace_guard.classifiers.embedding import Embedder
from headrace_guard.classifiers.heads import HARM, HEADS, INDIRECT, INJECTION
from headrace_guard_train import export, hazards, plan, report, topics, words_fit
from headrace_guard_train.cascade_figures import HeadFigures, figures_of
from headrace_guard_train.dense_fit import fit_dense, lesson_of
from headrace_guard_train.disguised import Stages, found_in_disguise, found_in_forms
from headrace_guard_train.examples import examples
from headrace_guard_train.fit import Fitted
from headrace_guard_train.instances import Cutter
from headrace_guard_train.judged import Judged, judge_linear
from headrace_guard_train.kept import Kept
from headrace_guard_train.rows import Row
from headrace_guard_train.sources import Source
from headrace_guard_train.states import StateCache

_FOREWORD = Path(__file__).parent.parent / "report-foreword.md"


@dataclass(frozen=True)
class Made:
    """Everything that was trained, and on what.

    Args:
        rows: all of them.
        manifest: where they are from.
        linear: by head.
        embedder: the embedding model.
        cache: what it said of windows.
        kept: what an earlier run left.
    """

    rows: Sequence[Row]
    manifest: Sequence[Source]
    linear: Mapping[str, Fitted]
    embedder: Embedder
    cache: StateCache
    kept: Kept


def run(made: Made, models: Path, documents: Path, work: Path) -> None:
    """Judge on left-out sources, then write models and report.

    Args:
        made: what was trained.
        models: folder of the artefact.
        documents: folder of the report.
        work: gets the scores of all rows, for whoever wants to see what was missed.
    """
    rows = plan.dense_rows(made.rows)
    items = examples(plan.dense_lessons(made.rows), plan.SEED)
    made.cache.fill(one.text for one in items)
    lesson = lesson_of(items, made.cache)
    dense = [fit_dense(lesson, left_out) for left_out in plan.folds(rows)]
    judged = {head: judge_linear(head, rows, made.linear[head]) for head in HEADS}
    vocabulary = words_fit.vocabulary(made.embedder, made.kept)
    taught = examples(plan.training_rows(made.rows), plan.SEED)
    nets = words_fit.fit_words(taught, vocabulary, made.embedder, plan.folds(rows))
    words = words_fit.judge_words(judged, vocabulary, made.embedder, nets)
    found = {head: figures_of(head, judged[head], words[head], dense, made.cache) for head in HEADS}
    for head, one in found.items():
        np.savez(
            work / f"scores-{head}.npz", linear=one.linear.scored.logits, **vars(one.cascade.scored)
        )
    stages = Stages(made.linear, vocabulary, nets, dense, made.embedder, made.cache)
    disguised = {
        head: found_in_disguise(head, made.rows, found[head], stages) for head in (INJECTION, HARM)
    }
    meant = hazards.fit(Cutter(rows).instances(HARM), rows, made.cache)
    topic = topics.fit(made.rows, made.cache, plan.SEED)
    last = fit_dense(lesson, frozenset())
    export.write(
        models, made.linear, (vocabulary, nets[-1]), last, found, meant, topic, made.manifest
    )
    figures = report.figures(found, meant, topic, _asked_of_ordinary(judged, found))
    figures["found_in_disguise"] = disguised
    figures["found_in_forms"] = {
        head: found_in_forms(head, made.rows, found[head], stages)
        for head in (INDIRECT, INJECTION, HARM)
    }
    report.write(documents, figures, found, _FOREWORD.read_text(encoding="utf-8"))


def _asked_of_ordinary(judged: Mapping[str, Judged], found: Mapping[str, HeadFigures]) -> float:
    """Return the share of ordinary texts of a user that any head asks the embedding about."""
    seen: set[int] = set()
    asked: set[int] = set()
    for head, one in judged.items():
        if head == INDIRECT:
            continue
        ordinary = np.isin(one.scored.sources, sorted(plan.ORDINARY))
        seen |= set(one.scored.rows[ordinary].tolist())
        asked |= found[head].asked
    return len(asked & seen) / max(len(seen), 1)
