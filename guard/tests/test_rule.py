"""Rules: candidates, checks, context, and what is still open at the end."""

from headrace_guard.classifiers.pattern import Chars, Edge, Seq, Text
from headrace_guard.classifiers.rule import Rule, RuleSet
from headrace_guard.normalise import Window

CODE = Rule("pii.code", Seq(Text("id-"), Chars("0-9", 2, 4), Edge()))


def spans(rules: RuleSet, text: str, *, is_final: bool = True) -> list[tuple[int, int]]:
    return [(match.start, match.end) for match in rules.find(Window(text, is_final=is_final))]


def test_finds_all_matches_at_their_places() -> None:
    """Leftmost first, without overlap."""
    assert spans(RuleSet([CODE]), "id-12, id-345 and id-6") == [(0, 5), (7, 13)]


def test_a_candidate_must_not_stand_inside_a_word() -> None:
    """`not_after` looks at the character before."""
    assert spans(RuleSet([CODE]), "void-12") == []


def test_the_character_before_the_window_counts() -> None:
    """A window that begins in a word still knows it."""
    window = Window("id-12 ", ("o", "o", "o", "o"))
    assert RuleSet([CODE]).find(window) == []


def test_a_refused_candidate_does_not_hide_one_inside_it() -> None:
    """After a failed check the search goes on one character further."""
    even = Rule(
        "pii.even",
        Seq(Chars("0-9a-z", 4)),
        check=lambda text: (0, 4) if text == "ab12" else None,
        not_after="~",
    )
    assert spans(RuleSet([even]), "xxab12") == [(2, 6)]


def test_a_check_may_narrow_the_span() -> None:
    """The context that was needed is remembered beside it."""
    inner = Rule("pii.inner", Text("key=abc"), check=lambda _: (4, 7))
    (match,) = RuleSet([inner]).find(Window("a key=abc"))
    assert (match.start, match.end, match.context_start) == (6, 9, 2)


def test_invisible_characters_do_not_hide_a_match() -> None:
    """Positions are those of the original text."""
    assert spans(RuleSet([CODE]), "an i\u200bd-\uff11\uff12 here") == [(3, 9)]


def test_live_from_is_where_a_match_may_still_begin() -> None:
    """Nothing is held in front of it, everything behind it."""
    rules = RuleSet([CODE])
    for text, live in [
        ("hello", 5), ("hello i", 6), ("hello id", 6), ("hello id-1", 6), ("hello id-12", 6),
        ("hello idx", 9), ("hello id-12 ", 12), ("void-1", 6),
    ]:  # fmt: skip
        assert rules.live_from(Window(text, is_final=False)) == live, text


def test_other_scripts_are_no_candidates_and_shift_nothing() -> None:
    """One character is one byte for the matcher."""
    assert spans(RuleSet([CODE]), "水車は id-12 です") == [(4, 9)]
