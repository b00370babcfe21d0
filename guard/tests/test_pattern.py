"""The two expressions of a pattern belong together."""

import pytest
import re2

from headrace_guard.classifiers.catalogue import RULES
from headrace_guard.classifiers.pattern import (
    ENDLESS,
    Chars,
    Edge,
    Either,
    Pattern,
    Repeat,
    Seq,
    Text,
    maybe,
    words,
)
from headrace_guard.classifiers.rule import Rule

PATTERNS: list[tuple[Pattern, str]] = [
    (Text("AKIA"), "AKIA"),
    (Text("Key", ignores_case=True), "kEY"),
    (Chars("0-9", 3), "123"),
    (Chars("0-9", 0, 2), "12"),
    (Chars("a-z", 2, ENDLESS), "abcdefgh"),
    (Seq(Text("a"), Edge(), Text("-"), Chars("0-9", 2)), "a-42"),
    (Either(Text("abc"), Text("xyz")), "xyz"),
    (Repeat(Seq(Text("."), Chars("0-9", 1, 3)), 1, 3), ".1.22.333"),
    (Repeat(Text("ab"), 0, ENDLESS), "abababab"),
    (Seq(maybe(Text("+")), Chars("0-9", 2), maybe(Text("!"))), "+12!"),
    (words("proj-", "ant-"), "ant-"),
]


@pytest.mark.parametrize(("pattern", "sample"), PATTERNS)
def test_every_beginning_of_a_match_is_a_prefix(pattern: Pattern, sample: str) -> None:
    """From nothing to the whole match."""
    assert re2.fullmatch(pattern.full(), sample)
    for end in range(len(sample) + 1):
        assert re2.fullmatch(pattern.prefix(), sample[:end]), sample[:end]


@pytest.mark.parametrize(("pattern", "sample"), PATTERNS)
def test_a_broken_beginning_is_no_prefix(pattern: Pattern, sample: str) -> None:
    """A character that no match has ends the hope, so nothing is held in vain."""
    assert not re2.fullmatch(pattern.prefix(), sample[: len(sample) // 2] + "~")
    assert not re2.fullmatch(pattern.full(), "~" + sample)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.category)
def test_every_rule_compiles_to_a_small_program(rule: Rule) -> None:
    """Bounded repetitions are copied by RE2; a large one would make matching slow."""
    assert re2.compile(rule.pattern.full()).programsize < 2000
    assert re2.compile(rule.pattern.prefix()).programsize < 4000
