"""Training on a slice: the whole way from rows to figures, and a floor that it must hold."""

import os
from pathlib import Path

import numpy as np
import pytest

from headrace_guard.classifiers.cuts import read
from headrace_guard.classifiers.heads import HARM, LinearHeads
from headrace_guard.classifiers.text_model import Point
from headrace_guard_train import own, plan, sources
from headrace_guard_train.cascade_figures import linear_figures
from headrace_guard_train.duplicates import without_doubles
from headrace_guard_train.fit import fit_linear
from headrace_guard_train.instances import Cutter, capped
from headrace_guard_train.judged import judge_linear
from headrace_guard_train.matrix import fit_logistic, stack
from headrace_guard_train.operating import Scored, auc, thresholds, true_ratio_at

_ROOT = Path(__file__).parents[3]
_DATA = Path(os.environ.get("HEADRACE_TEST_GUARD_DATA", _ROOT.parent / "shared" / "guard-data"))
_ROWS_A_SOURCE = 60
_PLANTED = {"own_indirect", "own_planted"}
# A little below what the slice gives: .84 to .99, and .70 of words that nobody taught.
_LEAST_AUC = 0.8
_LEAST_OWN_AUC = 0.65


def test_own_rows_are_the_same_each_time() -> None:
    """One seed, one corpus: otherwise no run could be repeated."""
    assert own.generate(3, 0.02) == own.generate(3, 0.02)
    assert own.generate(3, 0.02) != own.generate(4, 0.02)


def test_own_templates_leave_no_slot_open() -> None:
    """Every slot that a template names has values."""
    rows = own.generate(plan.SEED, 0.1)
    chat = [
        row
        for row in rows
        if row.source not in {"own_documents", "own_pasted", "own_indirect", "own_notices"}
        and row.source not in {"own_planted", *plan.WRITTEN, *plan.INDEPENDENT}
    ]
    assert not [row.text for row in chat if "{" in row.text and '"role"' not in row.text]


def test_an_insertion_is_where_the_row_says() -> None:
    """The span of a document with something foreign in it is that text."""
    rows = [row for row in own.generate(plan.SEED, 0.05) if row.source in _PLANTED]
    assert rows
    for row in rows:
        start, end = row.spans[0]
        assert 0 <= start < end <= len(row.text)
        assert row.text[start:end].strip() == row.text[start:end]


def test_the_fit_finds_what_tells_rows_apart() -> None:
    """A feature that only positives have gets a positive weight."""
    rows = [np.array([5, 1 + number % 3], np.int32) for number in range(8)]
    rows += [np.array([9, 1 + number % 3], np.int32) for number in range(8)]
    labels = np.array([1.0] * 8 + [0.0] * 8)
    weights, _ = fit_logistic(stack(rows), labels, np.ones(16), 0.1)
    assert weights[5] > 0.5 > -0.5 > weights[9]


def test_thresholds_count_every_source_the_same() -> None:
    """A large harmless source must not hide a small one that is hit."""
    logits = np.concatenate([np.linspace(0, 1, 1000), np.linspace(5, 6, 20)])
    names = np.array(["large"] * 1000 + ["small"] * 20)
    clean = Scored(np.arange(1020), names, np.zeros(1020, np.int64), logits)
    assert thresholds(clean)[Point.BALANCED] > 5
    assert auc(np.array([7.0]), logits) == 1.0
    assert true_ratio_at(np.array([5.5, 7.0]), clean, 0.01) == 0.5


@pytest.mark.parametrize(("num_rows", "num_hits"), [(108, 5), (280, 14)])
def test_no_small_source_has_more_hits_than_one_in_twenty(num_rows: int, num_hits: int) -> None:
    """Six of 108 rows are more than 5 %; 14 of 280 are not."""
    logits = np.concatenate([np.linspace(0, 1, 5000), np.linspace(5, 6, num_rows)])
    names = np.array([*(f"large {idx % 10}" for idx in range(5000)), *["small"] * num_rows])
    clean = Scored(np.arange(len(logits)), names, np.zeros(len(logits), np.int64), logits)
    assert (logits[names == "small"] >= thresholds(clean)[Point.BALANCED]).sum() == num_hits


@pytest.mark.timeout(200)
def test_own_rows_alone_hold_a_floor() -> None:
    """Without any fetched data: words that were not learnt are told apart by what is near."""
    rows = own.generate(plan.SEED, 0.15)
    words = {"own_words", "own_words_clean"}
    learnt = without_doubles([row for row in rows if row.source not in words])
    fitted = fit_linear(HARM, Cutter(learnt))
    heads = LinearHeads(fitted.weights[:, np.newaxis], np.array([fitted.bias], np.float32), [HARM])
    judged = [row for row in rows if row.source in words]
    logits = np.array(
        [heads.peaks(read(row.text), frozenset({HARM}))[HARM][0].logit for row in judged]
    )
    is_bad = np.array([row.labels[HARM] == 1 for row in judged])
    assert auc(logits[is_bad], logits[~is_bad]) > _LEAST_OWN_AUC


@pytest.mark.timeout(400)
@pytest.mark.skipif(not _DATA.is_dir(), reason=f"the fetched sources are not at {_DATA}")
def test_a_slice_holds_the_floor() -> None:
    """Harmful requests of a left-out source rank above clean texts."""
    fetched, manifest = sources.read(_DATA)
    assert all(source.licence and len(source.sha256) == 64 for source in manifest)
    rows = capped([*fetched, *own.generate(plan.SEED, 0.05)], {}, _ROWS_A_SOURCE, plan.SEED)
    fitted = fit_linear(HARM, Cutter(rows), is_final=False)
    found = linear_figures(judge_linear(HARM, rows, fitted)).linear.scored
    clean = found.logits[found.clean()]
    for source in ("harmfulqa", "adversarialqa", "dangerousqa"):
        assert auc(found.logits[~found.clean() & (found.sources == source)], clean) > _LEAST_AUC
