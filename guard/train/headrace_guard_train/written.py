"""Rows that were written one by one, not put together from slots: breadth where templates repeat.

Long texts give several copies, each without some of its sentences; short ones are roughened as
people type them. What is fine was written beside what is not, as near to it as it goes.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_guard.classifiers.heads import HARM, INDIRECT, INJECTION
from headrace_guard_train.documents import Documents
from headrace_guard_train.grammar import Grammar, roughen
from headrace_guard_train.rows import CLEAN_REQUEST, HAZARDS, NO_ATTACK, Row

_TEMPLATES = Path(__file__).parent.parent / "templates"
_ATTACK = {INJECTION: 1, INDIRECT: 1}
_HARMFUL = {INJECTION: 0, HARM: 1}
_SENTENCE = re.compile(r"(?<=[.!?]) ")
_DROPPED_RATIO = 0.2
_NUM_COPIES, _NUM_SHORT = 10, 3
_NUM_HIDDEN, _NUM_BESIDE = 900, 500
# Of requests, the share that somebody leads in or rounds off.
_FRAMED_RATIO = 0.3
_OPENERS = ("please,", "hi,", "quick question:", "ok so", "for a friend:", "hey", "I wonder:")
_CLOSERS = ("Thanks!", "Be brief.", "In detail, please.", "Any ideas?", "I need it today.", "thx")


def generate(seed: int, scale: float) -> list[Row]:
    """Return all rows, the same for the same seed.

    Args:
        seed: of the generator.
        scale: share of the usual number.
    """
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    return _personas(rng, scale) + _overrides(rng, scale) + _behaviours(rng) + _hidden(rng, scale)


def _load(name: str) -> dict[str, Any]:  # Any: TOML
    return tomllib.loads((_TEMPLATES / name).read_text(encoding="utf-8"))


def _personas(rng: random.Random, scale: float) -> list[Row]:
    data = _load("personas.toml")
    grammar = Grammar(data["slots"], frozenset({"name", "trade", "thing", "ask"}))
    kinds: Sequence[tuple[str, Mapping[str, int]]] = (
        ("unbound", _ATTACK), ("bound", CLEAN_REQUEST),
    )  # fmt: skip
    return [
        Row(roughen(_shortened(grammar.expand(text, rng), rng), rng), f"own_{kind}", labels)
        for kind, labels in kinds
        for text in data[kind]
        for _ in range(max(1, int(_NUM_COPIES * scale)))
    ]


def _shortened(text: str, rng: random.Random) -> str:
    """Return a text without some of its sentences."""
    return " ".join(one for one in _SENTENCE.split(text) if rng.random() >= _DROPPED_RATIO) or text


def _overrides(rng: random.Random, scale: float) -> list[Row]:
    data = _load("overrides.toml")
    grammar = Grammar(data["slots"], frozenset())
    kinds: Sequence[tuple[str, str, Mapping[str, int]]] = (
        ("attack", "own_overrides", _ATTACK), ("fine", "own_overrides_fine", CLEAN_REQUEST),
    )  # fmt: skip
    return [
        Row(roughen(text, rng), source, labels)
        for kind, source, labels in kinds
        for text in grammar.sample(data[kind], int(_NUM_SHORT * scale * len(data[kind])), rng)
    ]


def _behaviours(rng: random.Random) -> list[Row]:
    data = _load("behaviours.toml")
    rows: list[Row] = []
    for hazard in HAZARDS:
        rows += [
            Row(_framed(text, rng), "own_behaviours", _HARMFUL, hazard=hazard)
            for text in data[hazard]["bad"]
        ]
        rows += [
            Row(_framed(text, rng), "own_behaviours_fine", CLEAN_REQUEST)
            for text in data[hazard]["fine"]
        ]
    return rows


def _framed(text: str, rng: random.Random) -> str:
    if rng.random() < _FRAMED_RATIO:
        text = rng.choice([f"{rng.choice(_OPENERS)} {text}", f"{text} {rng.choice(_CLOSERS)}"])
    return roughen(text, rng)


def _hidden(rng: random.Random, scale: float) -> list[Row]:
    data = _load("hidden.toml")
    kinds = [kind for kind in data if kind not in ("hidden", "slots")]
    documents = Documents(data, kinds)
    hidden = data["hidden"]
    slots = {**data["slots"], "text": hidden["texts"], "text2": hidden["text2"]}
    grammar = Grammar(slots, frozenset())
    rows = [
        Row(documents.make(rng), "own_beside", NO_ATTACK) for _ in range(int(_NUM_BESIDE * scale))
    ]
    for made in grammar.sample(hidden["wraps"], int(_NUM_HIDDEN * scale), rng):
        order = roughen(made, rng)
        text, start = documents.with_insertion(order, rng)
        rows.append(Row(text, "own_hidden", {INDIRECT: 1}, ((start, start + len(order)),)))
    return rows
