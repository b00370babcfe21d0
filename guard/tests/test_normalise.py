"""Views: what they show, where it comes from, and that more text never changes them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_guard.normalise import (
    NO_LEFTS,
    Mode,
    Window,
    _Builder,
    _view_by_pieces,
    fold,
    map_character,
    next_lefts,
    view_of,
)
from headrace_testing.guard_plans import fullwidth

_TEXT = st.text(
    st.one_of(
        st.characters(),
        st.sampled_from("ab \t\n\u00a0\u200b\u0301éßİﬁ\uff21한水\U000e0061\u202e"),
    ),
    max_size=40,
)
_MODES = st.sampled_from(list(Mode))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Straße", "strasse"),
        ("CANARY", "canary"),
        (fullwidth("canary"), "canary"),
        ("ca\u200bna\u2060ry", "canary"),
        ("c\u0301a\u0302nary", "canary"),
        ("cañón", "canon"),
        ("ﬁne", "fine"),
        ("a \t\n\u00a0 b", "a b"),
        ("  outer ", "outer"),
        ("\u202eabc", "abc"),
        ("a \u200b b", "a b"),
        ("İx", "ix"),
        ("がく", "か\u3099く"),
        ("\u200b", ""),
    ],
)
def test_fold(text: str, shown: str) -> None:
    """Compatibility forms, case, accents, invisible characters and white space do not matter."""
    assert fold(text) == shown


def test_each_mode_treats_invisible_characters_its_own_way() -> None:
    """Taken out, made a space, read as ASCII, or left."""
    text = "a\u200bb\U000e0063d"
    shown = {mode: view_of(text, mode, is_folded=True).text for mode in Mode}
    assert shown == {
        Mode.RAW: text,
        Mode.DROPPED: "abd",
        Mode.SEPARATED: "a b d",
        Mode.DECODED: "abcd",
        Mode.LOOKALIKE: "abd",
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\u0441\u0430n\u0430ry", "canary"),
        ("\u0441\u0430\u0301n\u0430ry", "canary"),
        ("\u03b1\u03bf", "ao"),
        ("\u0661\u0662\u0663", "123"),
        ("a\u2010b\u2212c", "a-b-c"),
        ("水車", "水車"),
        ("øre", "ore"),
    ],
)
def test_lookalikes_are_read_as_ascii(text: str, shown: str) -> None:
    """Letters by their looks, digits by what they mean; what looks like nothing stays."""
    assert view_of(text, Mode.LOOKALIKE, is_folded=True).text == shown


def test_equal_views_are_looked_at_once() -> None:
    """Plain text has one view; invisible characters make three, tags four."""
    assert len(Window("plain text").folded_views()) == 1
    assert len(Window("a\u200bb").folded_views()) == 3
    assert len(Window("a\U000e0062").folded_views()) == 4


@settings(max_examples=150)
@given(_TEXT, _MODES, st.booleans())
def test_every_character_knows_its_origin(text: str, mode: Mode, is_folded: bool) -> None:
    """What stands in a view is what the character at its origin became."""
    view = view_of(text, mode, is_folded)
    origins = [view.origin(idx) for idx in range(len(view.text))]
    assert origins == sorted(origins)
    for char, origin in zip(view.text, origins, strict=True):
        assert char in map_character(text[origin], mode, is_folded)


@settings(max_examples=150)
@given(_TEXT, _TEXT, _MODES, st.booleans())
def test_more_text_never_changes_a_view(text: str, more: str, mode: Mode, is_folded: bool) -> None:
    """The view of a beginning is the beginning of the view: chunk borders hide nothing."""
    begun, whole = view_of(text, mode, is_folded), view_of(text + more, mode, is_folded)
    assert whole.text.startswith(begun.text)
    length = range(len(begun.text))
    assert [begun.origin(idx) for idx in length] == [whole.origin(idx) for idx in length]


@settings(max_examples=150)
@given(_TEXT, _TEXT, _MODES)
def test_a_view_goes_on_where_the_last_one_ended(text: str, more: str, mode: Mode) -> None:
    """Two views in a row, joined by `next_lefts`, show the whole."""
    lefts = next_lefts(NO_LEFTS, text)
    for is_folded in (False, True):
        first = view_of(text, mode, is_folded)
        second = view_of(more, mode, is_folded, lefts[mode.value])
        assert first.text + second.text == view_of(text + more, mode, is_folded).text


def test_a_span_leaves_out_invisible_characters_around_it() -> None:
    """The original span is from the first to the last visible character."""
    view = view_of("x\u200b\u200bab\u200bc\u200by", Mode.DROPPED, is_folded=True)
    start = view.text.index("abc")
    assert view.span(start, start + 3) == (3, 7)


def test_a_border_inside_one_character_is_known() -> None:
    """A ligature's letters have one origin."""
    view = view_of("ﬁx", Mode.DROPPED, is_folded=True)
    assert view.text == "fix"
    assert view.cuts_character(1)
    assert not view.cuts_character(2)


def test_hidden_characters_are_counted() -> None:
    """What any view leaves out counts."""
    assert Window("a" + "\u200b" * 5 + "b  c").num_hidden_chars() == 6
    assert Window("plain").num_hidden_chars() == 0


@given(st.text(st.sampled_from("aB ,\t\n\r"), max_size=30), st.sampled_from(["", "x", " "]))
@settings(max_examples=100, deadline=None)
def test_runs_of_spaces_collapse_as_they_do_piece_by_piece(text: str, left: str) -> None:
    """The short way for plain text gives the view that the long way gives."""
    by_pieces = _view_by_pieces(text, _Builder(Mode.DROPPED, True, left), True)
    assert view_of(text, Mode.DROPPED, is_folded=True, left=left) == by_pieces


@given(_TEXT, st.sampled_from(["", "x", " "]))
@settings(max_examples=60, deadline=None)
def test_the_word_view_is_the_folded_view_of_lookalikes(text: str, left: str) -> None:
    """Whether or not it was made before for another purpose."""
    window = Window(text, ("", "", "", "", left))
    assert window.word_view() == view_of(text, Mode.LOOKALIKE, is_folded=True, left=left)
