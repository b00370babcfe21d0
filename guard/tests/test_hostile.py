"""Texts made to be slow: time grows with the length, not with its square."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from headrace_guard.classifiers.blocklist import Blocklist
from headrace_guard.classifiers.catalogue import RULES
from headrace_guard.classifiers.rule import Check, RuleSet
from headrace_guard.normalise import Window
from headrace_testing.guard_plans import plan, run

SHAPES: dict[str, Callable[[int], str]] = {
    "digits": lambda n: "4" * n,
    "digit soup": lambda n: ("4 1-" * n)[:n],
    "local parts": lambda n: ("a.b-c_" * n)[:n],
    "at signs": lambda n: ("a@a." * n)[:n],
    "keys begun": lambda n: ("-----BEGIN PRIVATE KEY" * n)[:n],
    "tokens begun": lambda n: ("eyJaaaaaaaaaa." * n)[:n],
    "assignments": lambda n: ('password = "' * n)[:n],
    "dots": lambda n: ("1." * n)[:n],
    "colons": lambda n: ("a:" * n)[:n],
    "invisible": lambda n: "\u200b" * n,
    "accents": lambda n: "a" + "\u0301" * n,
    "tags": lambda n: "\U000e0061" * n,
    "escapes": lambda n: ("\\u0061" * n)[:n],
    "escapes begun": lambda n: ("\\ud835\\u00" * n)[:n],
    "backslashes": lambda n: "\\" * n,
    "spaces": lambda n: " \t" * (n // 2),
}


def checked_chars(text: str) -> int:
    """Characters of all candidates that some rule has to check."""
    total = 0

    def counting(check: Check) -> Check:
        def counted(candidate: str) -> tuple[int, int] | None:
            nonlocal total
            total += len(candidate)
            return check(candidate)

        return counted

    rules = [replace(rule, check=counting(rule.check)) for rule in RULES if rule.check is not None]
    RuleSet(rules).find(Window(text))
    return total


@pytest.mark.parametrize("shape", SHAPES)
def test_candidates_grow_with_the_text(shape: str) -> None:
    """Twice the text, at most about twice the characters that rules have to check."""
    short, long = (checked_chars(SHAPES[shape](length)) for length in (4_000, 8_000))
    assert long <= 2.2 * short + 2_000


@pytest.mark.parametrize("shape", SHAPES)
def test_a_hostile_stream_stays_bounded(shape: str) -> None:
    """Whatever comes, the text that waits stays below its bound, and the check ends."""
    made = plan(output='"*" = "redact"\nblocklist = "block"', terms=("a a b", "canary bird"))
    text = SHAPES[shape](6_000)
    result = run(made, [text[at : at + 37] for at in range(0, len(text), 37)])
    assert result.max_held_chars <= 2048 + 256


def test_a_blocklist_of_repeats_stays_linear() -> None:
    """Every beginning of the term is live everywhere, but none is longer than a term."""
    blocklist = Blocklist(["a " * 90 + "b"])
    window = Window("a " * 20_000, is_final=False)
    assert len(window.text) - blocklist.live_from(window) <= 181
    assert blocklist.find(window) == []
