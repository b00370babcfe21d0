"""A whole request: every part, every failure to look."""

from headrace_common.clock import SystemClock
from headrace_guard.deadline import Deadline
from headrace_guard.input_check import InputResult, Part, check_input
from headrace_guard.plan import Plan
from headrace_guard.policy import Direction
from headrace_guard.verdict import Action, Reason, State
from headrace_testing.guard_plans import no_deadline, plan

MIXED = plan(
    input_='blocklist = "block"\n"pii.*" = "redact"\n"secret.*" = "flag"',
    terms=("canary",),
    owner_exempt=("pii.*",),
    direction=Direction.INPUT,
)


def check(
    made: Plan,
    *texts: str,
    owners: bool = False,
    missed: Reason | None = None,
    seconds: float = 60.0,
) -> InputResult:
    parts = [Part(text, owners) for text in texts]
    return check_input(made, parts, missed, 1000, Deadline(SystemClock(), seconds))


def test_every_part_is_looked_at() -> None:
    """Findings name the part and the place in it."""
    result = check(MIXED, "hi", "", "please canary now")
    assert result.verdict.action is Action.BLOCK
    assert [(f.part_idx, f.start, f.end) for f in result.verdict.findings] == [(2, 7, 13)]


def test_clean_is_clean() -> None:
    """All parts were seen and nothing was found."""
    result = check(MIXED, "hi", "there")
    assert (result.verdict.state, result.verdict.action) == (State.CLEAN, Action.ALLOW)
    assert result.redacted_parts == {}


def test_redaction_rewrites_only_the_span_of_its_part() -> None:
    """Positions are code points of the original."""
    result = check(MIXED, "hi", "é水 a@b.co!")
    assert result.verdict.action is Action.REDACT
    assert result.redacted_parts == {1: "é水 [redacted pii.email]!"}


def test_a_flagged_part_is_not_rewritten() -> None:
    """Only what the policy redacts changes."""
    result = check(MIXED, "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2ln")
    assert (result.verdict.action, result.redacted_parts) == (Action.FLAG, {})


def test_the_owners_text_is_exempt_only_from_what_the_policy_says() -> None:
    """A support address in a system prompt is fine, a blocked word is not."""
    assert check(MIXED, "write to a@b.co", owners=True).verdict.state is State.CLEAN
    assert check(MIXED, "the canary", owners=True).verdict.action is Action.BLOCK


def test_what_nobody_reads_is_not_evaluated() -> None:
    """An image part is never clean."""
    verdict = check(MIXED, "hi", missed=Reason.OPAQUE_PART).verdict
    assert (verdict.state, verdict.action) == (State.NOT_EVALUATED, Action.UNAVAILABLE)


def test_a_block_stands_beside_what_was_not_seen() -> None:
    """It is refused as blocked, not as unavailable."""
    verdict = check(MIXED, "canary", missed=Reason.OPAQUE_PART).verdict
    assert (verdict.state, verdict.action) == (State.HIT, Action.BLOCK)


def test_too_long_is_not_evaluated() -> None:
    """All parts count together."""
    verdict = check(MIXED, "x " * 300, "y " * 300).verdict
    assert (verdict.state, verdict.reason) == (State.NOT_EVALUATED, Reason.TOO_LONG)


def test_out_of_time_is_not_evaluated() -> None:
    """Whatever was not reached was not seen."""
    verdict = check(MIXED, "hi", seconds=0.0).verdict
    assert (verdict.state, verdict.reason) == (State.NOT_EVALUATED, Reason.OUT_OF_TIME)


def test_an_open_policy_still_redacts_what_it_saw() -> None:
    """Failing open is no reason to pass on what was found."""
    opened = plan(input_='"pii.*" = "redact"', fails_open=True, direction=Direction.INPUT)
    result = check_input(opened, [Part("a@b.co", False)], Reason.OPAQUE_PART, 1000, no_deadline())
    assert (result.verdict.state, result.verdict.action) == (State.NOT_EVALUATED, Action.REDACT)
    assert result.redacted_parts == {0: "[redacted pii.email]"}
