"""What is trained on what: rows a source, held-out folds, heads. Fixed before results were seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from headrace_guard_train.augment import with_copies
from headrace_guard_train.instances import capped
from headrace_guard_train.rows import Row

SEED = 7
# Families of writers who had seen no source and no template (`headrace_guard_train.independent`).
INDEPENDENT = frozenset(
    {
        "own_slipped", "own_for_people", "own_carriers", "own_talked", "own_talked_fine",
    }
)  # fmt: skip
CAPS = {
    "clinc150": 500, "banking77": 250, "davidson": 500, "own_abuse": 500, "surge_toxicity": 400,
    "own_documents": 300, "own_pasted": 250, "own_indirect": 500, "own_long": 400,
    "own_harm": 1200, "own_asks": 1200, "own_planted": 900, "own_notices": 500,
    "own_words": 2400, "own_words_clean": 2400,
    **dict.fromkeys(INDEPENDENT, 2000),
}  # fmt: skip
DEFAULT_CAP = 800
# The embedding stage sees few texts, so it learns from few.
DENSE_CAPS = {
    "clinc150": 300, "banking77": 120, "davidson": 200, "own_abuse": 200, "surge_toxicity": 150,
    "own_documents": 150, "own_pasted": 100, "own_indirect": 300, "own_long": 60,
    "own_roleplay": 150, "cyberseceval_instruct": 150, "cyberseceval_frr": 250,
    "own_jailbreak": 180, "own_harm_wrapped": 200, "own_direct": 320,
    "inthewild_jailbreak": 280, "own_chat": 250,
    "own_security": 150, "own_meta": 200, "own_harm": 700, "own_asks": 700, "own_same_frames": 600,
    "own_planted": 500, "own_notices": 200, "own_trick": 450, "own_twin": 350,
    "own_words": 1300, "own_words_clean": 1300,
    **dict.fromkeys(INDEPENDENT, 1000),
}  # fmt: skip
DEFAULT_DENSE_CAP = 450
# Left out one after the other, of all heads at once: exactly one source of harmful requests, and of
# each kind of clean text (intents, instructions, code and security, documents, role play) no more
# than one or two. A model that has never seen a kind says nothing about one source of it.
LEFT_OUT = (
    frozenset({
        "harmfulqa", "inthewild_jailbreak", "davidson",
        "banking77", "own_documents", "own_security", "safe_prompts",
    }),
    frozenset({
        "adversarialqa", "cyberseceval_pi_en", "surge_toxicity",
        "clinc150", "own_pasted", "cyberseceval_instruct", "own_roleplay",
    }),
    frozenset({
        "do_not_answer", "do_not_answer_soft", "self_instruct", "own_long", "cyberseceval_frr",
    }),
    frozenset({"dangerousqa", "bipia", "own_chat", "synthetic_roleplay"}),
    frozenset({"hh_first_turns", "own_sensitive", "own_notices"}),
)  # fmt: skip
# Families whose rows were written one by one (`headrace_guard_train.written`).
WRITTEN = frozenset(
    {
        "own_unbound", "own_bound", "own_overrides", "own_overrides_fine", "own_behaviours",
        "own_behaviours_fine", "own_hidden", "own_beside",
    }
)  # fmt: skip
# Families that came later than the rest; see `capped`.
LATER = frozenset(
    {
        "own_notices", "own_planted", "own_trick", "own_twin", "own_words", "own_words_clean",
        *WRITTEN, *INDEPENDENT,
    }
)  # fmt: skip
# What most callers send: short requests of all kinds, and banking and home intents.
ORDINARY = frozenset({"safe_prompts", "self_instruct", "clinc150", "banking77", "own_chat"})
# Own families that are ours to give: positives, and the clean counterparts that were written with
# them. They are always learnt from; to leave them out would judge a model that is never shipped.
ALWAYS = frozenset(
    {
        "own_direct", "own_jailbreak", "own_meta", "own_trigger", "own_indirect", "own_abuse",
        "own_harm", "own_harm_wrapped", "own_harm_topics", "own_harmless_words", "own_asks",
        "own_same_frames", "own_asks_clean", "own_planted", "own_trick", "own_twin",
        "own_words", "own_words_clean", *WRITTEN, *INDEPENDENT,
    }
)  # fmt: skip


# Own families whose writers had read rows of a source: never learnt from by who judges that source.
RESEMBLING = {
    "cyberseceval_pi_en": frozenset(
        {"own_trick", "own_twin", "own_overrides", "own_overrides_fine"}
    ),
    "bipia": frozenset({"own_planted", "own_hidden", "own_beside"}),
}


def folds(rows: Sequence[Row]) -> list[frozenset[str]]:
    """Share all sources out; a model of a fold has seen nothing of what the fold names."""
    named = frozenset().union(*LEFT_OUT)
    found = {row.source for row in rows} - named - ALWAYS
    rest = [*sorted(found - LATER), *sorted(found & LATER)]
    return [sources | set(rest[idx :: len(LEFT_OUT)]) for idx, sources in enumerate(LEFT_OUT)]


def unlearnt(fold: frozenset[str]) -> frozenset[str]:
    """Return what a model that is to judge *fold* may not learn from."""
    return fold.union(*(RESEMBLING.get(source, ()) for source in fold))


def is_learnt(
    sources: Iterable[str], near: Iterable[frozenset[str]], left_out: frozenset[str]
) -> NDArray[np.bool_]:
    """Return which may be learnt from: none of a source left out, or much like one of it."""
    return np.array(
        [
            source not in left_out and not others & left_out
            for source, others in zip(sources, near, strict=True)
        ]
    )


def training_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that linear heads and words stage learn from, with copies in disguise."""
    return with_copies(capped(rows, CAPS, DEFAULT_CAP, SEED, LATER), SEED)


def dense_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that the dense stage learns from and that all stages are judged on."""
    return capped(rows, DENSE_CAPS, DEFAULT_DENSE_CAP, SEED, LATER)


def dense_lessons(rows: Sequence[Row]) -> list[Row]:
    """Return `dense_rows` and copies in disguise."""
    return with_copies(dense_rows(rows), SEED)
