"""Linear heads: fast ways give what the definitions say, so that shipped weights stay valid."""

import tomllib
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_guard.classifiers.artefact import load_packaged
from headrace_guard.classifiers.cuts import read
from headrace_guard.classifiers.heads import (
    HEADS,
    INDIRECT,
    SENTENCE_HEADS,
    SENTENCE_MARGIN,
    cut_of,
    num_peaks,
    within,
)
from headrace_guard.classifiers.ngrams import features

_TEMPLATES = Path(__file__).parents[1] / "train" / "templates"
_PRIMES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)
_MASK = 0xFFFFFFFF
_TEXT = st.text(st.sampled_from("ab'_ .,1\n\u00e9\u6c34\U0001f600"), max_size=60)


def _strings(data: object) -> list[str]:
    if isinstance(data, str):
        return [data]
    values = data.values() if isinstance(data, dict) else data
    return [text for value in values for text in _strings(value)] if values else []


def _template_texts() -> list[str]:
    """A few hundred short texts, and some of many windows."""
    files = sorted(_TEMPLATES.glob("*.toml"))
    short = [text for file in files for text in _strings(tomllib.loads(file.read_text("utf-8")))]
    long = ["\n".join(short[at : at + 40]) for at in range(0, len(short), 120)]
    return short[:: len(short) // 300 + 1] + long


def _bucket(number: int) -> int:
    number ^= number >> 15
    return (number * 2_654_435_761 & _MASK) >> 14


def _word_hash(word: str) -> int:
    number = 0
    for at, char in enumerate(word):
        number += (ord(char) + 0x9E37) * pow(0x01000193, min(at, 47) + 1, _MASK + 1)
    number &= _MASK
    return number ^ (number >> 13)


def _defined(text: str) -> list[tuple[int, int]]:
    """Buckets and positions, written down one by one."""
    padded = f" {text} "
    found = []
    for size in (3, 4, 5):
        for at in range(len(padded) - size + 1):
            run = zip(padded[at : at + size], _PRIMES, strict=False)
            number = size + sum(ord(char) * prime for char, prime in run)
            found.append((max(at - 1, 0), _bucket(number & _MASK)))
    words, places = [], []
    for is_word, run in groupby(enumerate(text), lambda pair: pair[1].isalnum() or pair[1] in "'_"):
        pairs = list(run)
        if is_word:
            words.append(_word_hash("".join(char for _, char in pairs)))
            places.append(pairs[0][0])
    for idx, at in enumerate(places):
        found.append((at, _bucket(words[idx])))
        if idx + 1 < len(words):
            pair = words[idx] * 0x7FEB352D + (words[idx + 1] ^ 0x846CA68B)
            found.append((at, _bucket(pair & _MASK)))
        if idx + 2 < len(words):
            triple = (words[idx] * 0x7FEB352D + words[idx + 1]) * 0x846CA68B + words[idx + 2]
            found.append((at, _bucket(triple & _MASK)))
    return sorted(found)


# Scripts from U+3100 on count as words or not by the last entry of a table: left out here.
@given(_TEXT.map(lambda text: text.replace("\u6c34", "").replace("\U0001f600", "")))
@settings(max_examples=150, deadline=None)
def test_features_are_hashed_as_the_shipped_weights_were_trained(text: str) -> None:
    """Another hash would make every weight that was trained before meaningless."""
    found = features(text)
    pairs = zip(found.positions.tolist(), found.buckets.tolist(), strict=True)
    assert sorted(pairs) == _defined(text)


@given(_TEXT)
@settings(max_examples=60, deadline=None)
def test_positions_rise_within_each_kind_of_feature(text: str) -> None:
    """Windows are cut out of each group by its first and last position."""
    found = features(text)
    ends = (0, *found.groups)
    assert ends[-1] == len(found.buckets)
    for start, end in pairwise(ends):
        assert np.all(np.diff(found.positions[start:end]) >= 0)


def test_peaks_are_the_highest_sums_of_windows() -> None:
    """Each window's weights, summed on their own, over the root of how many there are."""
    heads = load_packaged().linear
    readings = [read(text) for text in ("", " ", "a", *_template_texts())]
    assert len(readings) > 250
    assert max(len(one.text) for one in readings) > 2000
    for reading in readings:
        found = features(reading.text)
        peaks = heads.peaks(reading, frozenset(HEADS))
        assert tuple(peaks) == HEADS
        for row, (head, found_peaks) in enumerate(peaks.items()):
            places = [(it, 0.0) for it in reading.windows(cut_of(head))]
            if head in SENTENCE_HEADS:
                sentences = reading.sentences(cut_of(head))
                places += [(it, SENTENCE_MARGIN) for it in sentences]
                assert len(found_peaks) == 1 + bool(sentences)
            logits: dict[float, dict[tuple[int, int], float]] = {}
            for (begin, end), margin in places:
                inside = within(found, begin, end)
                total = heads._weights[row][inside].sum(dtype=np.float64)
                size = np.sqrt(max(len(inside), 1))
                logit = total / size + heads._biases[row] - margin
                logits.setdefault(margin, {})[begin, end] = logit
            for one in found_peaks:
                assert abs(logits[one.margin][one.begin, one.end] - one.logit) < 1e-6
                if one is found_peaks[0] or one.margin:
                    assert abs(one.logit - max(logits[one.margin].values())) < 1e-6


def test_several_peaks_lie_apart_and_the_highest_comes_first() -> None:
    """A document's second place is not the first one's neighbour, which overlaps it."""
    heads = load_packaged().linear
    texts = [text for text in _template_texts() if len(text) > 1000]
    assert texts
    for text in texts:
        (peaks,) = heads.peaks(read(text), frozenset({INDIRECT})).values()
        assert len(peaks) == num_peaks(INDIRECT)
        assert [one.logit for one in peaks] == sorted((one.logit for one in peaks), reverse=True)
        places = sorted((one.begin, one.end) for one in peaks)
        assert all(before[1] <= after[0] for before, after in pairwise(places))
