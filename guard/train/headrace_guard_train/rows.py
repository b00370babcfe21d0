"""One labelled text of the training material."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace_guard.classifiers.heads import HARM, INDIRECT, INJECTION, TOXICITY

# Not a head: rows that are only looked at.
HARM_SOFT = "harm_soft"
HAZARDS = tuple(f"S{number}" for number in range(1, 15))
# What nobody needs to worry about: a request, and a text that a request is about. A harmless
# request is no clean document: planted into one it is what `INDIRECT` looks for.
CLEAN_REQUEST: Mapping[str, int] = {INJECTION: 0, HARM: 0, TOXICITY: 0}
CLEAN_DOCUMENT: Mapping[str, int] = {**CLEAN_REQUEST, INDIRECT: 0}
NO_ATTACK: Mapping[str, int] = {INJECTION: 0, INDIRECT: 0}


@dataclass(frozen=True, slots=True)
class Row:
    """A text and what is known about it.

    Args:
        text: as written.
        source: where it is from; leave-one-source-out leaves all rows of one out.
        labels: 1 or 0 by head; a head that is missing is not known.
        spans: of a positive, the stretches that make it one; none = all of it. Of a clean text,
            what was put into it.
        hazard: MLCommons hazard id, if known.
        sub: the source's own finer name, where it has one.
        near: other sources that have a row much like it.
    """

    text: str
    source: str
    labels: Mapping[str, int]
    spans: tuple[tuple[int, int], ...] = ()
    hazard: str | None = None
    sub: str = ""
    near: frozenset[str] = frozenset()
