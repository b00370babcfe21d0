"""What is learnt from: no double, nothing like a left-out row, copies with their source."""

import random

from headrace_guard.classifiers.heads import HARM, INDIRECT, INJECTION
from headrace_guard_train import plan
from headrace_guard_train.augment import DISGUISES, with_copies
from headrace_guard_train.duplicates import without_doubles
from headrace_guard_train.rows import CLEAN_REQUEST, Row

_BAD = {INJECTION: 0, HARM: 1}
_TEXT = "how do i water tomatoes on a hot balcony in the middle of july without wasting water?"


def test_a_row_that_says_the_same_is_left_out() -> None:
    """The first one stays; another label or another source stays too."""
    rows = [
        Row(_TEXT, "a", CLEAN_REQUEST),
        Row(_TEXT.upper() + "!!", "a", CLEAN_REQUEST),
        Row(_TEXT, "a", _BAD),
        Row("an entirely different question about trains to the north", "a", CLEAN_REQUEST),
    ]
    assert [row.text for row in without_doubles(rows)] == [rows[0].text, rows[2].text, rows[3].text]


def test_a_row_like_one_of_another_source_is_marked() -> None:
    """And whoever leaves that source out does not learn from it."""
    rows = without_doubles(
        [
            Row(_TEXT, "own", CLEAN_REQUEST),
            Row(_TEXT.replace("july", "june"), "public", CLEAN_REQUEST),
            Row("which trains go to the north in winter?", "own", CLEAN_REQUEST),
        ]
    )
    assert [row.near for row in rows] == [{"public"}, {"own"}, frozenset()]
    sources, near = [row.source for row in rows], [row.near for row in rows]
    assert plan.is_learnt(sources, near, frozenset({"public"})).tolist() == [False, False, True]
    assert plan.is_learnt(sources, near, frozenset()).all()


def test_two_documents_with_other_insertions_stay() -> None:
    """What tells them apart is short."""
    rows = [
        Row(f"{_TEXT} {_TEXT} {_TEXT} {said}", "bipia", {INDIRECT: 1}, ((200, 210),))
        for said in ("tell a joke", "send a mail")
    ]
    assert len(without_doubles(rows)) == 2


def test_families_like_a_source_are_not_learnt_by_its_judge() -> None:
    """Whoever wrote them had read rows of it."""
    for source, families in plan.RESEMBLING.items():
        assert families <= plan.unlearnt(frozenset({source}))
    assert plan.unlearnt(frozenset({"davidson"})) == {"davidson"}


def test_each_harmful_source_is_left_out_alone() -> None:
    """Leave one out, not two."""
    harmful = {"harmfulqa", "adversarialqa", "do_not_answer", "dangerousqa", "hh_first_turns"}
    assert all(len(harmful & fold) == 1 for fold in plan.LEFT_OUT)
    assert harmful == harmful & frozenset().union(*plan.LEFT_OUT)


def test_copies_are_of_the_same_source_and_new() -> None:
    """Each disguise changes a text; the same seed gives the same copies."""
    rows = [Row(f"{_TEXT} {idx}", "a", _BAD, hazard="S1") for idx in range(200)]
    found = with_copies(rows, 5)
    copies = found[200:]
    assert found[:200] == rows
    assert copies == with_copies(rows, 5)[200:]
    assert copies
    assert {(row.source, row.hazard, tuple(row.labels)) for row in copies} == {
        ("a", "S1", (INJECTION, HARM))
    }
    rng = random.Random(3)
    for disguise in DISGUISES:
        assert any(disguise(_TEXT, rng) != _TEXT for _ in range(5)), disguise


def test_documents_are_not_disguised() -> None:
    """Neither long texts nor such with something planted."""
    rows = [Row(_TEXT * 20, "a", CLEAN_REQUEST), Row(_TEXT, "b", {INDIRECT: 1}, ((0, 5),))] * 50
    assert with_copies(rows, 1) == rows
