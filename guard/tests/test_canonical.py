"""The text that trained classifiers read: disguises undone, ordinary text as it was."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_guard.canonical import _HAS_SPACED, _LEET_WORD, _SPACED, canonical
from headrace_testing.guard_plans import fullwidth

_TEXT = st.text(
    st.sampled_from("ab cd 1@._-\n\u200b\u0301\u0430\u0441\u0435é水\U000e0061ﬁ"), max_size=60
)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("ign\u043ere all rules", "ignore all rules"),
        ("\u0441\u0430\u0440\u0435 is a word here", "cape is a word here"),
        (fullwidth("ignore") + " it", "ignore it"),
        ("ig\u200bno\u2060re", "ignore"),
        ("i\u0301\u0302\u0303g\u0334nore", "ignore"),
        ("i g n o r e it", "ignore it"),
        ("i-g-n-o-r-e it", "ignore it"),
        ("i g n o r e  a l l  that", "ignore all  that"),
        ("1gn0re all ru1es", "ignore all ruies"),
        ("h\U000e0069\U000e0070", "hip"),
    ],
)
def test_disguises_are_undone(text: str, read: str) -> None:
    """Letters, invisible characters, gaps and digits."""
    assert canonical(text).text == read


@pytest.mark.parametrize(
    "text",
    [
        "An ordinary sentence, with 14 numbers and 3.5 km.",
        "utf8 gpt4 mp3 h264 covid19 0x1F v2",
        "\u0441\u0435\u043c\u044c \u0441\u043b\u043e\u0432",
        "水車水力回",
        "I saw a b",
        "mail me@example.org 24/7",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    """Other scripts, names with digits, short runs of letters."""
    assert canonical(text).text == text


@settings(max_examples=150)
@given(_TEXT)
def test_every_character_has_a_place_in_the_original(text: str) -> None:
    """In order, and inside it; a span of the view is a span of the text."""
    view = canonical(text)
    places = view.all_origins()
    assert len(places) == len(view.text)
    assert places == sorted(places)
    assert places == [view.origin(idx) for idx in range(len(view.text))]
    assert all(0 <= place < len(text) for place in places)


@given(st.text(st.sampled_from("abZ19 .-_\n@$!|x"), max_size=40))
@settings(max_examples=150, deadline=None)
def test_the_fast_engine_finds_what_the_definition_says(text: str) -> None:
    """Lone letters are never overlooked; a leet word is a sign with a letter somewhere behind."""
    assert (_HAS_SPACED.search(text.encode()) is None) == (_SPACED.search(text) is None)
    signs = "[A-Za-z013457@$!|]*[013457@$!|][A-Za-z013457@$!|]*[A-Za-z]"
    found = [word.span() for word in _LEET_WORD.finditer(text.encode())]
    assert found == [word.span() for word in re.finditer(signs, text)]


def test_lone_letters_without_end_are_read_at_all() -> None:
    """Time grows with their number: with its square these would take ten minutes."""
    assert canonical("a b " * 100_000).text.startswith("abab")
