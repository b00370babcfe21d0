"""How much of left-out sources is still found in disguise, in JSON, or among other text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace_guard.classifiers.dense import Dense
from headrace_guard.classifiers.embedding import Embedder
from headrace_guard.classifiers.heads import INDIRECT
from headrace_guard.classifiers.text_model import Point
from headrace_guard_train import plan
from headrace_guard_train.augment import DISGUISES, MAX_CHARS
from headrace_guard_train.cascade_figures import HeadFigures
from headrace_guard_train.fit import Fitted
from headrace_guard_train.judged import judge_dense, judge_linear
from headrace_guard_train.rows import Row
from headrace_guard_train.states import StateCache
from headrace_guard_train.words_fit import Vocabulary, judge_words

_NUM_ROWS = 150


@dataclass(frozen=True)
class Stages:
    """All that was trained, by models that had not seen a fold.

    Args:
        linear: by head.
        words: vectors of the words stage.
        nets: its networks, one a fold.
        dense: networks of the dense stage, one a fold.
        embedder: the embedding model.
        cache: what it said of windows.
    """

    linear: Mapping[str, Fitted]
    words: Vocabulary
    nets: Sequence[Dense]
    dense: Sequence[Dense]
    embedder: Embedder
    cache: StateCache


def found_in_disguise(
    head: str, rows: Sequence[Row], figures: HeadFigures, stages: Stages
) -> dict[str, float]:
    """Return the share of positives found at the balanced point, by disguise; "none" is as written.

    Of long rows the beginning is taken.

    Args:
        head: which one.
        rows: all there are.
        figures: how its stages are put together.
        stages: the models.
    """
    left_out = frozenset().union(*plan.LEFT_OUT)
    fit = [
        row
        for row in rows
        if row.labels.get(head) == 1 and row.source in left_out and not row.spans
    ]
    rng = random.Random(plan.SEED)  # noqa: S311 - not for secrets
    chosen = [
        replace(row, text=row.text[:MAX_CHARS]) for row in rng.sample(fit, min(_NUM_ROWS, len(fit)))
    ]
    found = {"none": _found(head, chosen, figures, stages)}
    for disguise in DISGUISES:
        copies = [replace(row, text=disguise(row.text, rng)) for row in chosen]
        found[disguise.__name__.strip("_")] = _found(head, copies, figures, stages)
    return found


def found_in_forms(
    head: str, rows: Sequence[Row], figures: HeadFigures, stages: Stages
) -> dict[str, dict[str, float]]:
    """Return what a head hits at the balanced point, by the form it comes in.

    Args:
        head: which one; `indirect` reads documents, the others requests.
        rows: all there are.
        figures: how its stages are put together.
        stages: the models.

    Returns:
        By form: the share of positives of each source, and of clean texts, by source.
    """
    left_out = frozenset().union(*plan.LEFT_OUT)
    mine = [row for row in rows if head in row.labels and row.source in left_out]
    if head != INDIRECT:
        rng = random.Random(plan.SEED)  # noqa: S311 - not for secrets
        mine = [row for row in mine if len(row.text) <= MAX_CHARS]
        mine = [row for kind in (0, 1) for row in _some(mine, head, kind, rng)]
    names = [row.source if row.labels[head] else _clean_name(head, row) for row in mine]
    found: dict[str, dict[str, float]] = {}
    for form, put in (_FORMS if head == INDIRECT else _REQUEST_FORMS).items():
        # What was planted stands elsewhere then.
        copies = [replace(row, text=put(row.text), spans=()) for row in mine]
        hits = _hits(head, copies, figures, stages)
        found[form] = {
            name: float(np.mean(hits[np.array(names) == name])) for name in sorted(set(names))
        }
    return found


def _some(rows: Sequence[Row], head: str, label: int, rng: random.Random) -> list[Row]:
    """Return some rows of each source."""
    found: list[Row] = []
    for source in sorted({row.source for row in rows}):
        its = [row for row in rows if row.source == source and row.labels[head] == label]
        found += rng.sample(its, min(_NUM_ROWS, len(its)))
    return found


def _clean_name(head: str, row: Row) -> str:
    return f"{row.source}, clean" if head == INDIRECT else "clean, all sources"


def _as_value(text: str) -> str:
    return json.dumps({"status": "ok", "results": [{"id": 7, "title": "item", "content": text}]})


def _among_others(text: str) -> str:
    notes = {"id": 1, "title": "Release notes", "body": "Nothing new."}
    last = {"id": 3, "body": "See you on Monday."}
    return json.dumps([notes, {"id": 2, "title": "Q", "body": text}, last], indent=2)


def _in_a_string(text: str) -> str:
    return json.dumps({"content": [{"type": "text", "text": _as_value(text)}]})


_FORMS: Mapping[str, Callable[[str], str]] = {
    "as it is": str,
    "a value of JSON": _as_value,
    "one value among others": _among_others,
    "JSON inside a string of JSON": _in_a_string,
}


_REQUEST_FORMS: Mapping[str, Callable[[str], str]] = {
    "as it is": str,
    "behind a greeting": lambda text: f"Hello, I have a question for you today. {text}",
    "before thanks": lambda text: f"{text} Thanks in advance, and have a nice day!",
    "behind another request": lambda text: f"What is the capital of France? {text}",
    "behind a paragraph": lambda text: (
        "I am writing a report on the river trade of our town, which was once a busy harbour for "
        f"grain and timber. My teacher wants two pages of it by Monday.\n\n{text}"
    ),
    "between lines": lambda text: f"Nothing new.\n{text}\nSee you on Monday.",
    "a value of JSON": _as_value,
    "one value among others": _among_others,
    "JSON behind a sentence": lambda text: (
        f"Answer the question in this JSON.\n\n{json.dumps({'question': text}, indent=2)}"
    ),
}


def _found(head: str, rows: Sequence[Row], figures: HeadFigures, stages: Stages) -> float:
    return float(np.mean(_hits(head, rows, figures, stages)))


def _hits(
    head: str, rows: Sequence[Row], figures: HeadFigures, stages: Stages
) -> NDArray[np.bool_]:
    judged = judge_linear(head, rows, stages.linear[head])
    words = judge_words({head: judged}, stages.words, stages.embedder, stages.nets)[head]
    cheap = judged.logits + figures.words_share * words
    is_asked = cheap >= figures.band_from
    logits = judge_dense(head, judged, is_asked, stages.dense, stages.cache)
    summed = np.where(is_asked, logits + figures.linear_share * cheap, -np.inf)
    scored = judged.with_logits(summed)
    hits: NDArray[np.bool_] = scored.logits >= figures.cascade.logits[Point.BALANCED]
    return hits
