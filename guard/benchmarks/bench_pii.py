"""Recall and false positives of the rules on a labelled set of personal data and secrets.

    python guard/benchmarks/bench_pii.py SET.jsonl.gz [--misses]

Each line of the set is JSON with `text`, `label` (1: something is in it, 0: nothing is), `sub` (its
kind) and, for label 1, `value`, the text that must be found. A value counts as found if a match
covers at least nine tenths of it and is no longer than it and a quarter; of an assignment the
assigned value counts. A clean line counts as right if no rule finds anything.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace_guard.classifiers.catalogue import RULES
from headrace_guard.classifiers.rule import RuleSet
from headrace_guard.normalise import Window

_COVERED_RATIO, _LONGER_RATIO = 0.9, 1.25
_ASSIGNMENT = "PASSWORD_ASSIGN"
_RULES = RuleSet(RULES)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("set", type=Path, help="JSON lines, plain or .gz")
    parser.add_argument("--misses", action="store_true", help="print what was missed or wrong")
    wanted = parser.parse_args()
    total: Counter[str] = Counter()
    right: Counter[str] = Counter()
    by_category: Counter[str] = Counter()
    for row in _rows(wanted.set):
        kind = str(row["sub"]) if row["label"] else f"clean, {row['sub']}"
        total[kind] += 1
        spans = _spans(row["text"])
        by_category.update({category for category, _ in spans})
        is_right = _is_found(row, spans) if row["label"] else not spans
        right[kind] += is_right
        if wanted.misses and not is_right:
            sys.stdout.write(f"{kind}: {row['text']!r} -> {spans}\n")
    _row("kind", "lines", "right", "ratio")
    for kind in sorted(total):
        _row(kind, str(total[kind]), str(right[kind]), f"{right[kind] / total[kind]:.3f}")
    _row("lines with", *(f"{name} {count}" for name, count in by_category.most_common(3)))


def _rows(path: Path) -> Iterator[dict[str, Any]]:  # Any: JSON values
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            yield json.loads(line)


def _spans(text: str) -> list[tuple[str, str]]:
    return [(one.category, text[one.start : one.end]) for one in _RULES.find(Window(text))]


def _is_found(row: dict[str, Any], spans: list[tuple[str, str]]) -> bool:
    value = str(row["value"])
    if row["sub"] == _ASSIGNMENT:
        value = value.partition("=")[2].strip(" \"'")
    return any(
        (span in value or value in span)
        and _COVERED_RATIO * len(value) <= len(span) <= _LONGER_RATIO * len(value) + 1
        for _, span in spans
    )


def _row(*cells: str) -> None:
    sys.stdout.write(
        f"| {cells[0]:20} | " + " | ".join(f"{cell:>22}" for cell in cells[1:]) + " |\n"
    )


if __name__ == "__main__":
    main()
