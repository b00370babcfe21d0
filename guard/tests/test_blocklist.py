"""Blocklists: whole words, any spelling, in pieces."""

import pytest

from headrace_guard.classifiers.blocklist import (
    MAX_TERM_CHARS,
    Blocklist,
    BlocklistCache,
    BlocklistTooLargeError,
)
from headrace_guard.normalise import Window
from headrace_testing.guard_plans import fullwidth


def hits(terms: list[str], text: str) -> list[str]:
    return [text[m.start : m.end] for m in Blocklist(terms).find(Window(text))]


@pytest.mark.parametrize(
    ("term", "text"),
    [
        ("art", "party"), ("art", "Artist, start, art1, éart"), ("foo bar", "foobar foo-bar"),
        ("한", "가나"), ("f", "ﬁx"), ("ㄱ", "각"),
    ],
)  # fmt: skip
def test_parts_of_words_are_no_hits(term: str, text: str) -> None:
    """Borders of words are borders of hits; a character is never cut."""
    assert hits([term], text) == []


@pytest.mark.parametrize(
    ("term", "text", "found"),
    [
        ("art", "The ART, of", "ART"),
        ("art", "my_art_2", "art"),
        ("Foo  Bar", "a foo\n\tbar.", "foo\n\tbar"),
        ("canary", "ca\u200bn\u00adary", "ca\u200bn\u00adary"),
        ("canary", "the\u200bcanary\u200bsings", "canary"),
        ("canary", fullwidth("canary"), fullwidth("canary")),
        ("canary", "c\u0336a\u0336nary", "c\u0336a\u0336nary"),
        ("canary", "canary™", "canary"),
        ("canary", "ca\u0489nary", "ca\u0489nary"),
        ("canary", "c\u20dda\u20e3nary", "c\u20dda\u20e3nary"),
        ("canary", "c\u249cn\u249cry", "c\u249cn\u249cry"),
        ("canary", "\U0001f112anary", "\U0001f112anary"),
        ("canary", "\u0188\u2c65nary", "\u0188\u2c65nary"),
        ("can", "x \U000e0063\U000e0061\U000e006e y", "\U000e0063\U000e0061\U000e006e"),
        ("schön", "SCHÖN", "SCHÖN"),
        ("straße", "STRASSE", "STRASSE"),
        ("水車", "この水車は", "水車"),
        ("서울", "서울에서", "서울"),
        ("c++", "in c++17", "c++"),
        ("canary", "canary\u0301 x", "canary"),
    ],
)  # fmt: skip
def test_disguised_words_are_hits(term: str, text: str, found: str) -> None:
    """Case, width, accents, invisible characters and white space hide nothing."""
    assert found in hits([term], text)


def test_overlapping_terms_are_all_found() -> None:
    """A shorter term inside a longer one does not get lost."""
    assert hits(["bird cage", "cage door", "cage"], "bird cage door") == [
        "bird cage", "cage", "cage door",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "live"),
    [("the ca", 4), ("the cat", 7), ("the canary", 4), ("the canary ", 4), ("the canary.", 11),
     ("xca", 3), ("canary bi", 0), ("canary bo", 9), ("ca\u200b\u200b", 0), ("", 0)],
)  # fmt: skip
def test_only_the_beginning_of_a_term_is_live(text: str, live: int) -> None:
    """At most the longest tail that begins a term is held."""
    blocklist = Blocklist(["canary", "canary bird"])
    assert blocklist.live_from(Window(text, is_final=False)) == live


def test_a_word_at_the_end_waits_for_its_border() -> None:
    """ "art" may become "artist" while text can follow."""
    blocklist = Blocklist(["art"])
    assert blocklist.find(Window("an art", is_final=False)) == []
    assert len(blocklist.find(Window("an art", is_final=True))) == 1


def test_terms_without_a_visible_character_are_left_out() -> None:
    """They would match everywhere or nowhere."""
    blocklist = Blocklist(["", "\u200b", "  "])
    assert blocklist.find(Window("anything at all")) == []
    assert blocklist.live_from(Window("anything", is_final=False)) == 8


def test_bounds_of_a_list() -> None:
    """Too long a term, too many of them, or too much text is refused."""
    cache = BlocklistCache(max_lists=2, max_terms=3, max_chars=1000)
    with pytest.raises(BlocklistTooLargeError):
        Blocklist(["x" * (MAX_TERM_CHARS + 1)])
    with pytest.raises(BlocklistTooLargeError):
        cache.get(("a", "b", "c", "d"))
    with pytest.raises(BlocklistTooLargeError):
        cache.get(("x " * 600,))


def test_the_cache_is_bounded_and_keeps_what_is_used() -> None:
    """The list unused for longest goes first."""
    cache = BlocklistCache(max_lists=2, max_terms=3, max_chars=1000)
    first = cache.get(("a",))
    cache.get(("b",))
    assert cache.get(("a",)) is first
    cache.get(("c",))
    assert len(cache) == 2
    assert cache.get(("a",)) is first
