"""What is trained on what: rows a source, held-out folds, heads. Fixed before results were seen."""

from __future__ import annotations

from collections.abc import Sequence

from headrace_guard_train.instances import capped
from headrace_guard_train.rows import Row

SEED = 7
CAPS = {
    "clinc150": 500, "banking77": 250, "davidson": 500, "own_abuse": 500, "surge_toxicity": 400,
    "own_documents": 300, "own_pasted": 250, "own_indirect": 500, "own_long": 400,
    "own_harm": 1200, "own_asks": 1200, "own_planted": 900, "own_notices": 500,
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
}  # fmt: skip
DEFAULT_DENSE_CAP = 450
# Left out one after the other, of all heads at once, with a share of the ordinary sources each.
LEFT_OUT = (
    frozenset({"harmfulqa", "inthewild_jailbreak", "davidson"}),
    frozenset({"adversarialqa", "do_not_answer", "cyberseceval_pi_en", "surge_toxicity"}),
    frozenset({"dangerousqa", "hh_first_turns", "bipia"}),
)
# Families that came later than the rest; see `capped`.
LATER = frozenset({"own_notices", "own_planted", "own_trick", "own_twin"})
# What most callers send: short requests of all kinds, and banking and home intents.
ORDINARY = frozenset({"safe_prompts", "self_instruct", "clinc150", "banking77", "own_chat"})
# Own families that are ours to give: positives, and the clean counterparts that were written with
# them. They are always learnt from; to leave them out would judge a model that is never shipped.
ALWAYS = frozenset(
    {
        "own_direct", "own_jailbreak", "own_meta", "own_trigger", "own_indirect", "own_abuse",
        "own_harm", "own_harm_wrapped", "own_harm_topics", "own_harmless_words", "own_asks",
        "own_same_frames", "own_asks_clean", "own_planted", "own_trick", "own_twin",
    }
)  # fmt: skip


def folds(rows: Sequence[Row]) -> list[frozenset[str]]:
    """Share all sources out; a model of a fold has seen nothing of what the fold names."""
    named = frozenset().union(*LEFT_OUT)
    found = {row.source for row in rows} - named - ALWAYS
    rest = [*sorted(found - LATER), *sorted(found & LATER)]
    return [sources | set(rest[idx :: len(LEFT_OUT)]) for idx, sources in enumerate(LEFT_OUT)]


def training_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that are learnt from."""
    return capped(rows, CAPS, DEFAULT_CAP, SEED, LATER)


def dense_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that the dense stage learns from and that both stages are judged on."""
    return capped(rows, DENSE_CAPS, DEFAULT_DENSE_CAP, SEED, LATER)
