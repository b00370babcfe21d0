r"""Escapes of JSON: what programs read is judged, in either direction, and stays JSON."""

import json

import pytest

from headrace_guard.normalise import Window
from headrace_guard.policy import Direction
from headrace_testing.guard_plans import plan, run

TERMS = ("canary", "secret project", "zürich", "\U0001d431y")
BLOCK = plan(output='blocklist = "block"\n"secret.*" = "block"', terms=TERMS)
REDACT = plan(output='"*" = "redact"', terms=TERMS)


def pieces(text: str) -> list[list[str]]:
    """A text whole, and character by character."""
    return [[text], [*text, ""]]


@pytest.mark.parametrize(
    "said",
    [
        r"go\ncanary",
        r"the \u0063anary sings",
        r"the can\u0061ry sings",
        r"the \x63anary sings",
        r"say\u0020canary!",
        r"\\ncanary",
        r"secret\nproject x",
        r"secret \u0070roject x",
        r"z\u00fcrich",
        r"Z\u00DCRICH",
        r"\ud835\udc31y",
        r"x\nAKIAIOSFODNN7EXAMPLE ",
    ],
)
def test_what_a_program_reads_is_blocked_and_nothing_of_it_gets_out(said: str) -> None:
    """However the text is cut."""
    for cut in pieces(f'{{"a":"{said}"}}'):
        result = run(BLOCK, cut)
        assert result.is_over
        assert len(result.findings) == 1
        assert len(result.released) <= result.findings[0].start


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (r"Card:\n4111111111111111 ok", "Card:\n[redacted pii.card] ok"),
        (r"to\ta@b.com\nnext", "to\t[redacted pii.email]\nnext"),
        (r"to a\u0040b.com", "to [redacted pii.email]"),
        (r"\n\u0044E89370400440532013000\n", "\n[redacted pii.iban]\n"),
        (r"the c\u0061nary.", "the [redacted blocklist]."),
        (r"the \"canary\" sings", 'the "[redacted blocklist]" sings'),
    ],
)
def test_redacted_text_is_still_json(said: str, kept: str) -> None:
    """The letter of an escape is no part of a mail address."""
    for cut in pieces(f'{{"a":"{said}"}}'):
        result = run(REDACT, cut)
        assert json.loads(result.released) == {"a": kept}


@pytest.mark.parametrize(
    "text",
    [
        r"C:\new\table \frac{a}{b} \nabla \u00zz \\\\ \x4g",
        r'{"a":"\u4f60\u597d\n\ud83d\ude00 \ud83d \udc00","b":"x\\"}',
        "\\",
        "\\u",
        "\\" * 40,
    ],
)
def test_other_text_passes_unchanged(text: str) -> None:
    """Escapes or not, and half ones at the end."""
    for cut in pieces(text):
        result = run(BLOCK, cut)
        assert (result.released, result.findings) == (text, [])


def test_a_word_after_a_backslash_is_found_as_it_stands() -> None:
    """Nobody says that it is JSON."""
    made = plan(output='blocklist = "block"', terms=("nice",))
    for cut in pieces(r"so \nice of you"):
        assert run(made, cut).is_over


def test_what_goes_in_is_read_so_too() -> None:
    """Arguments of a former call come back with each turn."""
    made = plan(
        input_='blocklist = "block"\n"pii.*" = "redact"', terms=TERMS, direction=Direction.INPUT
    )
    window = Window(r'{"a":"go\ncanary","b":"Card:\n4111111111111111"}')
    found = sorted(match for one in made.all_classifiers for match in one.find(window))
    assert [window.text[match.start : match.end] for match in found] == [
        "canary",
        "4111111111111111",
    ]
