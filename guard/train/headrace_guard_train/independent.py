"""Rows of writers who had seen no source and no template: every fold may learn from them.

Each text was written one by one, with no slots: orders and questions for a machine that reads
(`own_slipped`), put into documents that were written so too, and what such documents say to people
(`own_for_people`) in the same places; short ways to get at what a model keeps to itself
(`own_talked`) beside what only sounds so.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace_guard.classifiers.heads import INDIRECT, INJECTION
from headrace_guard_train.rows import CLEAN_DOCUMENT, CLEAN_REQUEST, NO_ATTACK, Row

_TEMPLATES = Path(__file__).parent.parent / "templates"
_ATTACK = {INJECTION: 1, INDIRECT: 1}
# Behind a sentence, behind a line, behind a cell; and what then stands before and behind.
_BORDERS = (
    (re.compile(r"(?<=[.!?]) (?=\S)"), " ", " "),
    (re.compile(r"\n+"), "\n", "\n"),
    (re.compile(r" \| "), " | ", " | "),
)


def generate(seed: int, scale: float) -> list[Row]:
    """Return all rows, the same for the same seed.

    Args:
        seed: of the generator.
        scale: share of the texts.
    """
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    return _slipped(rng, scale) + _talked(rng, scale)


def put_in(document: str, foreign: str, rng: random.Random) -> tuple[str, int]:
    """Return a document with *foreign* as a sentence, line or cell of its own, and where it begins.

    First, last and anywhere in between are as likely.
    """
    where = rng.randrange(3)
    if where < 2:
        gap = rng.choice(("\n", "\n\n", " "))
        if where == 0:
            return foreign + gap + document, 0
        return document + gap + foreign, len(document) + len(gap)
    kinds = [
        (places, before, behind)
        for border, before, behind in _BORDERS
        if (places := list(border.finditer(document)))
    ]
    if not kinds:
        return f"{document}\n{foreign}", len(document) + 1
    places, before, behind = rng.choice(kinds)
    place = rng.choice(places)
    head = document[: place.start()] + before
    return head + foreign + behind + document[place.end() :], len(head)


def _load(name: str, rng: random.Random, scale: float) -> dict[str, list[str]]:
    """Return all lists of a file, of each a share in random order."""
    data = tomllib.loads((_TEMPLATES / name).read_text(encoding="utf-8"))
    return {
        kind: rng.sample(texts, max(1, int(scale * len(texts)))) for kind, texts in data.items()
    }


def _slipped(rng: random.Random, scale: float) -> list[Row]:
    data = _load("slipped.toml", rng, scale)
    rows = [Row(text, "own_carriers", CLEAN_DOCUMENT) for text in data["carriers"]]
    kinds: Sequence[tuple[str, str, Mapping[str, int]]] = (
        ("planted", "own_slipped", {INDIRECT: 1}), ("beside", "own_for_people", NO_ATTACK),
    )  # fmt: skip
    for kind, source, labels in kinds:
        for foreign in data[kind]:
            text, start = put_in(rng.choice(data["carriers"]), foreign, rng)
            rows.append(Row(text, source, labels, ((start, start + len(foreign)),)))
    return rows


def _talked(rng: random.Random, scale: float) -> list[Row]:
    data = _load("talked.toml", rng, scale)
    return [Row(text, "own_talked", _ATTACK) for text in data["attack"]] + [
        Row(text, "own_talked_fine", CLEAN_REQUEST) for text in data["fine"]
    ]
