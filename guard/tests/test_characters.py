"""Facts about single characters that the rest builds on."""

import pytest

from headrace_guard.characters import decode_tag, forms_words, is_dropped_mark, is_invisible, is_tag


@pytest.mark.parametrize(
    "char",
    ["\u200b", "\u200d", "\u2060", "\ufeff", "\u00ad", "\u202e", "\u2066", "\ufe0f", "\U000e0041",
     "\U000e0100", "\u034f", "\u3164", "\x00", "\x08", "\x7f", "\u180e"],
)  # fmt: skip
def test_characters_that_show_as_nothing_are_invisible(char: str) -> None:
    """Whole classes, not a list of known tricks."""
    assert is_invisible(char)


@pytest.mark.parametrize("char", ["a", " ", "\n", "\t", "\u00a0", "\u0301", "水", ".", "\u2028"])
def test_letters_and_white_space_are_visible(char: str) -> None:
    """White space parts words, so it is never taken out."""
    assert not is_invisible(char)


@pytest.mark.parametrize(
    "char", ["\u0301", "\u0335", "\u20dd", "\u20e3", "\u0489", "\u05b0", "\u064b", "\u0670"]
)
def test_accents_points_and_frames_are_dropped_marks(char: str) -> None:
    """They can be put on any letter without making it unreadable."""
    assert is_dropped_mark(char)


@pytest.mark.parametrize("char", ["\u3099", "\u094d", "\u093c", "\u0e48", "\u0e38", "a"])
def test_marks_that_make_another_word_stay(char: str) -> None:
    """Kana voicing, virama, nukta, Thai tones and vowels carry meaning."""
    assert not is_dropped_mark(char)


def test_tags_are_read_as_ascii() -> None:
    """The tag block mirrors printable ASCII."""
    assert is_tag("\U000e0041")
    assert decode_tag("\U000e0041") == "A"
    assert not is_tag("A")
    assert not is_tag("\U000e0001")


def test_scripts_without_spaces_have_no_word_borders() -> None:
    """Side by side, such characters may belong to two words."""
    assert all(forms_words(char) for char in "aZ9éяक\u093f")
    assert not any(forms_words(char) for char in "水カ한ไ._- \u200b")
