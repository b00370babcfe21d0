"""The words stage: a word that was never learnt counts like the taught ones near it."""

from pathlib import Path

import numpy as np

from headrace_guard.classifiers.artefact import unpacked_dense
from headrace_guard.classifiers.heads import HARM, HEADS
from headrace_guard.classifiers.words import Words
from headrace_guard_train.dense_fit import packed
from headrace_guard_train.examples import examples
from headrace_guard_train.kept import Kept
from headrace_guard_train.rows import CLEAN_REQUEST, Row
from headrace_guard_train.words_fit import Vocabulary, fit_words, vocabulary

_NUM_PIECES = 2000
_TAUGHT, _NEAR = {"poison": 1200, "bread": 1300}, {"venom": 1201, "cake": 1301}


class _Model:
    """Neighbouring numbers mean nearly the same."""

    num_pieces = _NUM_PIECES

    def pieces(self, text: str) -> list[int]:
        known = {**_TAUGHT, **_NEAR}
        return [known.get(word, 1500 + 7 * len(word)) for word in text.split()]

    def look_at_pieces(self, ids: object) -> np.ndarray:
        angles = np.asarray(list(ids), np.float32)[:, np.newaxis] * 0.001 * np.arange(1, 193)  # type: ignore[call-overload]
        both = np.concatenate([np.cos(angles), np.sin(angles)], axis=1, dtype=np.float32)
        unit: np.ndarray = both / np.linalg.norm(both, axis=1, keepdims=True)
        return unit


def test_a_word_near_a_taught_one_counts_like_it(tmp_path: Path) -> None:
    """And the packed network says nearly what the trained one said."""
    rows = [
        Row(f"{word} for {number * 'x'}", source, {**CLEAN_REQUEST, HARM: int(word == "poison")})
        for number in range(1, 30)
        for source in ("one", "two")
        for word in _TAUGHT
    ]
    model = _Model()
    words = vocabulary(model, Kept(tmp_path))  # type: ignore[arg-type]
    again = vocabulary(model, Kept(tmp_path))  # type: ignore[arg-type]
    assert np.array_equal(words.vectors, again.vectors)
    assert isinstance(words, Vocabulary)
    assert words.vectors.shape == (_NUM_PIECES, 128)
    *_, net = fit_words(examples(rows, 1), words, model, [])  # type: ignore[arg-type]
    small = unpacked_dense(packed(net, "words"), HEADS, "words")
    served = Words(words.vectors, words.scale, small)
    found = {word: served.logits(model.pieces(f"{word} for x"))[HARM] for word in _NEAR}
    assert found["venom"] > found["cake"] + 1
