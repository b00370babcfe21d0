"""Trains the dense stage, judges all stages and writes the models and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace_guard.classifiers.heads import HARM, HEADS, INDIRECT
from headrace_guard_train import export, hazards, plan, report, topics
from headrace_guard_train.cascade_figures import figures_of
from headrace_guard_train.dense_fit import fit_dense, lesson_of
from headrace_guard_train.examples import examples
from headrace_guard_train.fit import Fitted
from headrace_guard_train.instances import Cutter
from headrace_guard_train.judged import Judged, judge_linear
from headrace_guard_train.operating import Scored
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
        cache: what the embedding model said of windows.
    """

    rows: Sequence[Row]
    manifest: Sequence[Source]
    linear: Mapping[str, Fitted]
    cache: StateCache


def run(made: Made, models: Path, documents: Path, work: Path) -> None:
    """Judge on left-out sources, then write models and report.

    Args:
        made: what was trained.
        models: folder of the artefact.
        documents: folder of the report.
        work: gets the scores of all rows, for whoever wants to see what was missed.
    """
    rows = plan.dense_rows(made.rows)
    items = examples(rows, plan.SEED)
    made.cache.fill(one.text for one in items)
    lesson = lesson_of(items, made.cache)
    dense = [fit_dense(lesson, left_out) for left_out in plan.folds(rows)]
    judged = {head: _judged(head, rows, made.linear[head], work) for head in HEADS}
    found = {head: figures_of(head, judged[head], dense, made.cache) for head in HEADS}
    for head, one in found.items():
        np.savez(
            work / f"scores-{head}.npz", linear=one.linear.scored.logits, **vars(one.cascade.scored)
        )
    meant = hazards.fit(Cutter(rows).instances(HARM), rows, made.cache)
    topic = topics.fit(made.rows, made.cache, plan.SEED)
    export.write(
        models, made.linear, fit_dense(lesson, frozenset()), found, meant, topic, made.manifest
    )
    asked = _asked_of_ordinary(judged, {head: one.band_from for head, one in found.items()})
    figures = report.figures(found, meant, topic, asked)
    report.write(documents, figures, found, _FOREWORD.read_text(encoding="utf-8"))


def _judged(head: str, rows: Sequence[Row], fit: Fitted, work: Path) -> Judged:
    """Score rows with the linear stage, or take the scores from an earlier run."""
    kept = work / f"judged-{head}.npz"
    if not kept.is_file():
        made = judge_linear(head, rows, fit)
        np.savez(kept, folds=made.folds, texts=np.array(made.texts), **vars(made.scored))
    with np.load(kept, allow_pickle=False) as found:
        scored = Scored(found["rows"], found["sources"], found["labels"], found["logits"])
        return Judged(scored, found["folds"], found["texts"].tolist())


def _asked_of_ordinary(judged: Mapping[str, Judged], bands: Mapping[str, float]) -> float:
    """Return the share of ordinary texts of a user that any head asks the embedding about."""
    seen: set[int] = set()
    asked: set[int] = set()
    for head, one in judged.items():
        if head == INDIRECT:
            continue
        scored = one.scored
        ordinary = np.isin(scored.sources, sorted(plan.ORDINARY))
        seen |= set(scored.rows[ordinary].tolist())
        asked |= set(scored.rows[ordinary & (scored.logits >= bands[head])].tolist())
    return len(asked) / max(len(seen), 1)
