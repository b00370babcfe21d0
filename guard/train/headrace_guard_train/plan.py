"""What is trained on what: rows a source, held-out folds, heads. Fixed before results were seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_guard.classifiers.heads import HARM, INDIRECT, INJECTION, TOXICITY
from headrace_guard_train.instances import Instance, capped
from headrace_guard_train.rows import Row

SEED = 7
CAPS = {
    "clinc150": 500, "banking77": 250, "davidson": 500, "own_abuse": 500, "surge_toxicity": 400,
    "own_documents": 300, "own_pasted": 250, "own_indirect": 500, "own_long": 400,
}  # fmt: skip
DEFAULT_CAP = 800
# Rows whose windows are embedded: the embedding stage sees few texts, so it learns from few.
EMBEDDING_CAPS = {
    "clinc150": 300, "banking77": 120, "davidson": 200, "own_abuse": 200, "surge_toxicity": 150,
    "own_documents": 150, "own_pasted": 100, "own_indirect": 300, "own_long": 60,
    "own_roleplay": 150, "cyberseceval_instruct": 150, "cyberseceval_frr": 250,
    "own_jailbreak": 180, "own_harm_wrapped": 200, "own_direct": 320,
    "inthewild_jailbreak": 280, "own_chat": 250,
    "own_security": 150, "own_meta": 200,
}  # fmt: skip
DEFAULT_EMBEDDING_CAP = 450
# Left out one after the other, with the ordinary sources shared out among them.
POSITIVE_SOURCES = {
    INJECTION: ("inthewild_jailbreak", "cyberseceval_pi_en"),
    INDIRECT: ("bipia", "cyberseceval_pi_en"),
    HARM: ("harmfulqa", "adversarialqa", "dangerousqa", "do_not_answer"),
    TOXICITY: ("davidson", "surge_toxicity"),
}
# Own families that are ours to give: positives, and the clean counterparts that were written with
# them. They are always learnt from; to leave them out would judge a model that is never shipped.
ALWAYS = {
    INJECTION: frozenset({"own_direct", "own_jailbreak", "own_meta", "own_trigger"}),
    INDIRECT: frozenset({"own_direct", "own_jailbreak", "own_indirect"}),
    HARM: frozenset(
        {"own_harm", "own_harm_wrapped", "own_harm_topics", "own_harmless_words", "own_asks"}
    ),
    TOXICITY: frozenset({"own_abuse"}),
}
# Heads with an embedding stage. Sentences of documents have none: the linear head sees each of
# them, and their windows are too many to embed.
EMBEDDED = (INJECTION, HARM, TOXICITY)


@dataclass(frozen=True)
class Fold:
    """Sources that one model does not see."""

    left_out: frozenset[str]


def folds(head: str, rows: Sequence[Row]) -> list[Fold]:
    """Share all sources out among the positive sources of a head."""
    positive = POSITIVE_SOURCES[head]
    rest = sorted({row.source for row in rows if head in row.labels} - set(positive) - ALWAYS[head])
    return [
        Fold(frozenset({source, *rest[number :: len(positive)]}))
        for number, source in enumerate(positive)
    ]


def training_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that are learnt from."""
    return capped(rows, CAPS, DEFAULT_CAP, SEED)


def embedded_rows(rows: Sequence[Row]) -> set[int]:
    """Return which of the training rows, by index, have their windows embedded."""
    kept = {id(row) for row in capped(rows, EMBEDDING_CAPS, DEFAULT_EMBEDDING_CAP, SEED)}
    return {idx for idx, row in enumerate(rows) if id(row) in kept}


def embedded(
    windows: Sequence[Instance], rows: Sequence[Row], chosen: set[int], head: str
) -> list[Instance]:
    """Return the windows that the embedding stage of a head learns from: of a positive two."""
    taken: dict[int, int] = {}
    found: list[Instance] = []
    for window in windows:
        if window.row_idx not in chosen:
            continue
        taken[window.row_idx] = taken.get(window.row_idx, 0) + 1
        if taken[window.row_idx] <= 1 + rows[window.row_idx].labels[head]:
            found.append(window)
    return found
