"""Rows from the project's own templates: attacks, harmful requests, abuse, and what resembles them.

Every family is a source of its own for leave-one-source-out. Nothing here was taken from a test
set; the kinds of harmless text (words of violence about computers or sport, questions on
prevention, law and history, attacks that are quoted) are those that the literature describes.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_guard.classifiers.heads import HARM, INDIRECT, INJECTION, TOXICITY
from headrace_guard_train import independent, written
from headrace_guard_train.documents import KINDS, Documents
from headrace_guard_train.grammar import Grammar, roughen
from headrace_guard_train.rows import CLEAN_DOCUMENT, CLEAN_REQUEST, HAZARDS, NO_ATTACK, Row

TEMPLATES = Path(__file__).parent.parent / "templates"
LICENCE = "own"
_HARMFUL = {INJECTION: 0, HARM: 1}
_STICKY = frozenset({"name"})
_CHAT_FAMILIES = {
    "own_chat": 1200, "own_trigger": 900, "own_roleplay": 600, "own_security": 400,
    "own_meta": 500, "own_sensitive": 500,
}  # fmt: skip


def generate(seed: int, scale: float = 1.0) -> list[Row]:
    """Return all own rows, the same for the same seed.

    Args:
        seed: of the generator.
        scale: share of the usual number.
    """
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    rows = _chat(rng, scale) + _injection(rng, scale) + _harm(rng, scale) + _toxicity(rng, scale)
    rows += _documents(rng, scale) + _tricks(rng, scale)
    rows += _lexicon(rng, scale) + written.generate(seed, scale)
    return rows + independent.generate(seed, scale)


def _load(name: str) -> dict[str, Any]:  # Any: TOML
    return tomllib.loads((TEMPLATES / name).read_text(encoding="utf-8"))


def _chat(rng: random.Random, scale: float) -> list[Row]:
    data = _load("benign.toml")
    grammar = Grammar(data["slots"], frozenset())
    rows: list[Row] = []
    for family, count in _CHAT_FAMILIES.items():
        texts = grammar.sample(data[family]["templates"], int(count * scale), rng)
        rows += [Row(roughen(text, rng), family, CLEAN_REQUEST) for text in texts]
    # Several turns or requests in one text: length must not stand for an attack.
    turns = [row.text for row in rows]
    for _ in range(int(700 * scale)):
        parts = rng.sample(turns, rng.randint(3, 9))
        rows.append(Row(rng.choice(["\n", " ", "\n\n"]).join(parts), "own_long", CLEAN_REQUEST))
    return rows


def _injection(rng: random.Random, scale: float) -> list[Row]:
    data = _load("injection.toml")
    grammar = Grammar(data["slots"], _STICKY)
    rows: list[Row] = []
    for family, count in (("direct", 1300), ("jailbreak", 1300)):
        texts = grammar.sample(data[family]["templates"], int(count * scale), rng)
        labels = {INJECTION: 1, INDIRECT: 1}
        rows += [Row(roughen(text, rng), f"own_{family}", labels) for text in texts]
    return rows


def _tricks(rng: random.Random, scale: float) -> list[Row]:
    data = _load("tricks.toml")
    kinds: Sequence[tuple[str, Mapping[str, int]]] = (
        ("trick", {INJECTION: 1}), ("twin", {INJECTION: 0}),
    )  # fmt: skip
    return [
        Row(roughen(text, rng), f"own_{kind}", labels)
        for kind, labels in kinds
        for text in Grammar(data[kind], frozenset()).sample(
            data[kind]["templates"], int(1200 * scale), rng
        )
    ]


def _harm(rng: random.Random, scale: float) -> list[Row]:
    acts = [*_load("acts.toml")["act"], *_load("acts_more.toml")["act"]]
    frames, benign = _load("harmful.toml"), _load("harmful_benign.toml")
    rows: list[Row] = []
    for act in acts:
        for do in act["do"]:
            for frame in rng.sample(frames["direct"], max(1, int(7 * scale))):
                text = roughen(frame.replace("{do}", do), rng)
                labels = {INJECTION: 0, HARM: 1}
                rows.append(Row(text, "own_harm", labels, hazard=act["hazard"]))
            for frame in rng.sample(frames["wrapped"], max(1, int(2 * scale))):
                text = roughen(frame.replace("{do}", do), rng)
                rows.append(Row(text, "own_harm_wrapped", {HARM: 1}, hazard=act["hazard"]))
        for subject in act["ing"]:
            for frame in rng.sample(benign["frames"], max(1, int(14 * scale))):
                text = roughen(frame.replace("{ing}", subject), rng)
                rows.append(Row(text, "own_harm_topics", CLEAN_REQUEST))
    rows += _same_frames(rng, scale, frames)
    return rows + _asks(rng, scale, frames) + _more_asks(rng, scale) + _harmless(rng, scale, benign)


def _lexicon(rng: random.Random, scale: float) -> list[Row]:
    """Return short requests for what many words name; words and frames in fine ones."""
    data = _load("lexicon.toml")
    rows: list[Row] = []

    def add(
        kind: str, values: Sequence[str], frames: Sequence[str], count: int, hazard: str
    ) -> None:
        source, labels = ("own_words", _HARMFUL) if hazard else ("own_words_clean", CLEAN_REQUEST)
        for value in values:
            for frame in rng.sample(frames, max(1, int(count * scale))):
                text = roughen(frame.replace(f"{{{kind}}}", value), rng)
                rows.append(Row(text, source, labels, hazard=hazard or None))

    for hazard in HAZARDS:
        add("ask", data[hazard]["ask"], ["{ask}"], 1, hazard)
        for kind, frames in data["frames"].items():
            add(kind, data[hazard].get(kind, ()), frames, 4, hazard)
            add(kind, data[hazard].get(kind, ()), data["clean_frames"][kind], 3, "")
    acts = _load("acts_harmless.toml")
    add("do", [*acts["plain"], *acts["near"]], data["frames"]["do"], 5, "")
    add("goods", data["everyday"]["goods"], data["frames"]["goods"], 5, "")
    add("touchy", data["everyday"]["touchy"], ["{touchy}"], 1, "")
    return rows


def _same_frames(rng: random.Random, scale: float, frames: Mapping[str, Any]) -> list[Row]:
    """Return harmless acts in the frames that ask for harm."""
    acts = _load("acts_harmless.toml")
    return [
        Row(roughen(frame.replace("{do}", do), rng), "own_same_frames", CLEAN_REQUEST)
        for do in (*acts["plain"], *acts["near"])
        for kind, count in (("direct", 6), ("wrapped", 2))
        for frame in rng.sample(frames[kind], max(1, int(count * scale)))
    ]


def _more_asks(rng: random.Random, scale: float) -> list[Row]:
    data = _load("asks_more.toml")
    grammar = Grammar(data["slots"], frozenset())
    rows = [
        Row(
            roughen(text, rng),
            "own_asks",
            {INJECTION: 0, HARM: 1},
            hazard=kind if kind in HAZARDS else None,
        )
        for kind, templates in data["harmful"].items()
        for text in grammar.sample(templates, int(10 * scale * len(templates)), rng)
    ]
    clean = grammar.sample(data["clean"]["templates"], int(1000 * scale), rng)
    return rows + [Row(roughen(text, rng), "own_asks_clean", CLEAN_REQUEST) for text in clean]


def _asks(rng: random.Random, scale: float, data: Mapping[str, Any]) -> list[Row]:
    grammar = Grammar(data["slots"], frozenset())
    labels = {INJECTION: 0, HARM: 1}
    return [
        Row(roughen(text, rng), "own_asks", labels, hazard=hazard)
        for hazard, templates in data["own_asks"].items()
        for text in grammar.sample(templates, int(18 * scale * len(templates)), rng)
    ]


def _harmless(rng: random.Random, scale: float, data: Mapping[str, Any]) -> list[Row]:
    grammar = Grammar(data["slots"], frozenset())
    topics = grammar.sample(data["asks"], int(900 * scale), rng)
    rows = [Row(roughen(text, rng), "own_harm_topics", CLEAN_REQUEST) for text in topics]
    words = grammar.sample(data["harmless"], int(1400 * scale), rng)
    return rows + [Row(roughen(text, rng), "own_harmless_words", CLEAN_REQUEST) for text in words]


def _toxicity(rng: random.Random, scale: float) -> list[Row]:
    data = _load("toxicity.toml")
    grammar = Grammar(data["slots"], frozenset())
    labels: Mapping[str, Mapping[str, int]] = {
        "toxic": {TOXICITY: 1, INJECTION: 0},
        "benign": {TOXICITY: 0, INJECTION: 0, HARM: 0},
    }
    return [
        Row(roughen(text, rng), "own_abuse", labels[kind])
        for kind in ("toxic", "benign")
        for text in grammar.sample(data[kind]["templates"], int(1000 * scale), rng)
    ]


def _documents(rng: random.Random, scale: float) -> list[Row]:
    data = _load("documents.toml")
    documents = Documents(data, KINDS)
    injection = _load("injection.toml")
    grammar = Grammar({**injection["slots"], **injection["indirect"]}, _STICKY)
    rows = _made(documents, ("own_documents", CLEAN_DOCUMENT), int(900 * scale), rng)
    rows += [
        Row(documents.in_chat(rng), "own_pasted", CLEAN_REQUEST) for _ in range(int(500 * scale))
    ]
    templates = injection["indirect"]["templates"]
    attacks = grammar.sample(templates, int(900 * scale), rng)
    rows += _put_in(documents, "own_indirect", attacks, rng)
    # Tasks of all kinds, and documents that tell and ask their human readers all kinds of things.
    planted = _load("planted.toml")
    wordy = [kind for kind in planted if kind != "planted"]
    notices = Documents({**data, **planted}, wordy)
    rows += _made(notices, ("own_notices", NO_ATTACK), int(1200 * scale), rng)
    grammar = Grammar(planted["planted"], frozenset())
    tasks = grammar.sample(planted["planted"]["templates"], int(1600 * scale), rng)
    every = Documents({**data, **planted}, [*KINDS, *wordy])
    return rows + _put_in(every, "own_planted", [roughen(task, rng) for task in tasks], rng)


def _made(
    documents: Documents, kind: tuple[str, Mapping[str, int]], count: int, rng: random.Random
) -> list[Row]:
    return [Row(documents.make(rng), *kind) for _ in range(count)]


def _put_in(
    documents: Documents, source: str, attacks: Sequence[str], rng: random.Random
) -> list[Row]:
    rows: list[Row] = []
    for attack in attacks:
        text, start = documents.with_insertion(attack, rng)
        rows.append(Row(text, source, {INDIRECT: 1}, ((start, start + len(attack)),)))
    return rows
