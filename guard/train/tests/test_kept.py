"""What an earlier run left is taken if it was made from the same, and never otherwise."""

from pathlib import Path

import numpy as np
import pytest

from headrace_guard.classifiers.heads import HARM
from headrace_guard_train.fit import Fitted, fit_linear
from headrace_guard_train.instances import Cutter
from headrace_guard_train.kept import Arrays, Kept, key_of
from headrace_guard_train.rows import CLEAN_REQUEST, Row


def _fit(kept: Kept | None, word: str) -> Fitted:
    rows = [
        Row(f"{kind} number {number}", "one", {**CLEAN_REQUEST, HARM: label})
        for number in range(6)
        for kind, label in ((word, 1), ("bread", 0))
    ]
    return fit_linear(HARM, Cutter(rows), kept=kept)


def test_a_fit_of_other_rows_is_not_taken(tmp_path: Path) -> None:
    """A folder that is left over from other rows gives what an empty one gives."""
    kept = Kept(tmp_path)
    _fit(kept, "poison")
    assert np.array_equal(_fit(kept, "venom").weights, _fit(None, "venom").weights)


def test_a_fit_of_the_same_rows_is_taken(tmp_path: Path) -> None:
    """Nothing is made a second time."""
    kept = Kept(tmp_path)
    first = _fit(kept, "poison")
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = _fit(kept, "poison")
    assert np.array_equal(first.weights, again.weights)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == files


def test_what_was_cut_short_is_not_there(tmp_path: Path) -> None:
    """A run that fails while it makes something leaves no file that a later one would take."""

    def fails() -> Arrays:
        raise RuntimeError

    kept = Kept(tmp_path)
    with pytest.raises(RuntimeError):
        kept.arrays("x", [1], fails)
    assert kept.arrays("x", [1], lambda: {"found": np.arange(3)})["found"].tolist() == [0, 1, 2]


def test_keys_tell_arrays_apart() -> None:
    """By type, by shape and by content."""
    whole = np.arange(4, dtype=np.int32)
    others = [whole.reshape(2, 2), whole.astype(np.int64), whole + 1, "0 1 2 3", b"", [0, 1, 2, 3]]
    assert len({key_of([one]) for one in (whole, *others)}) == 1 + len(others)
    assert key_of([whole]) == key_of([whole.copy()])
