"""Rows that were written one by one: both sides of each kind, copies that differ."""

import re
from collections import Counter

from headrace_guard.classifiers.heads import INDIRECT
from headrace_guard_train import plan, written
from headrace_guard_train.rows import HAZARDS

_OPEN_SLOT = re.compile(r"\{\w+\}")


def test_one_seed_gives_the_same_rows() -> None:
    """Otherwise no run could be repeated."""
    assert written.generate(3, 0.1) == written.generate(3, 0.1)
    assert written.generate(3, 0.1) != written.generate(4, 0.1)


def test_every_family_is_planned_and_leaves_no_slot_open() -> None:
    """What the plan names is what is made; it is never judged."""
    rows = written.generate(plan.SEED, 0.5)
    assert {row.source for row in rows} == plan.WRITTEN <= plan.ALWAYS
    assert not [row.text for row in rows if _OPEN_SLOT.search(row.text)]


def test_every_hazard_has_both_sides() -> None:
    """For each request that should not be helped with there is one as near to it that is fine."""
    rows = written.generate(plan.SEED, 1.0)
    bad = Counter(row.hazard for row in rows if row.source == "own_behaviours")
    assert bad.keys() == set(HAZARDS)
    assert sum(row.source == "own_behaviours_fine" for row in rows) >= bad.total()


def test_copies_of_a_long_text_differ() -> None:
    """Sentences are left out, at another place each time."""
    rows = [row.text for row in written.generate(plan.SEED, 1.0) if row.source == "own_unbound"]
    assert len(set(rows)) > 0.9 * len(rows)


def test_what_is_hidden_is_where_the_row_says() -> None:
    """The span is the foreign text, as it was typed."""
    rows = [row for row in written.generate(plan.SEED, 0.2) if row.source == "own_hidden"]
    assert rows
    for row in rows:
        start, end = row.spans[0]
        assert row.labels == {INDIRECT: 1}
        assert row.text[start:end] == row.text[start:end].strip() != ""
        assert start == 0 or row.text[start - 1] in "\n "
        assert end == len(row.text) or row.text[end] in "\n "
