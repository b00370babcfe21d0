"""Words in disguise are found, and what only looks a little like one is not."""

import codecs

import pytest

from headrace_guard.classifiers.blocklist import Blocklist
from headrace_guard.disguise import RUN_BREAK, spaced_letters
from headrace_guard.normalise import View, Window

TERMS = Blocklist(["canary", "wet paint", "kill", "ass", "ill"])


def found(text: str, *, is_final: bool = True) -> list[str]:
    return [text[m.start : m.end] for m in TERMS.find(Window(text, is_final=is_final))]


@pytest.mark.parametrize(
    "hidden",
    [
        "c4n4ry",
        "C4NARY",
        "c@n@ry",
        "k1ll",
        "k!ll",
        "kiII",
        "@ss",
        "\u04414n4r\u0443",
        "c a n a r y",
        "c-a-n-a-r-y",
        "C.A.N.A.R.Y",
        "c  a  n  a  r  y",
        "c 4 n 4 r y",
        "w e t p a i n t",
        codecs.encode("canary", "rot13"),
        codecs.encode("wet paint", "rot13"),
        "\uff43 \uff41 \uff4e \uff41 \uff52 \uff59",
    ],
)
def test_a_word_in_disguise_is_found(hidden: str) -> None:
    """The span is that of the disguise, no more."""
    assert hidden in found(f"so {hidden}, they say")


@pytest.mark.parametrize(
    "harmless",
    ["lil", "a55", "455", "1 2 3 4", "c a n a p y", "I saw a c a t", "canary2 4canary", "k1lls"],
)
def test_what_is_no_disguise_is_left_alone(harmless: str) -> None:
    """No pure numbers, no parts of longer words."""
    assert found(f"so {harmless}, they say") == []


def test_the_last_letter_of_a_text_that_goes_on_is_not_certain() -> None:
    """It may be the first of a word; until then the whole run waits."""
    assert found("the c a n a r y", is_final=False) == []
    assert TERMS.live_from(Window("the c a n a r y", is_final=False)) == 4
    assert found("the c a n a r yes", is_final=False) == []
    assert found("the c a n a r y. And", is_final=False) == ["c a n a r y"]


def test_runs_of_lone_letters_are_kept_apart() -> None:
    """A word between them, or a wide gap, ends a run."""
    view = spaced_letters(View("a b of c d     e"))
    assert view.text == f"ab{RUN_BREAK}cd{RUN_BREAK}e"
    assert view.span(3, 5) == (7, 10)
