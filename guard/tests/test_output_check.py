"""One choice of an output: what comes out when."""

import json

from headrace_common.clock import SystemClock
from headrace_guard.deadline import Deadline
from headrace_guard.output_check import OutputCheck
from headrace_guard.verdict import Action, Reason, State
from headrace_testing.guard_plans import no_deadline, plan, run

BLOCK = plan(output='blocklist = "block"', terms=("canary",))


def test_text_passes_at_once_under_a_flag_only_policy() -> None:
    """No character waits, whatever it may become."""
    flagging = plan(output='"*" = "flag"')
    check = OutputCheck(flagging, 0, 1024)
    for piece in ["mail a", "@", "b.c", "o and ", "AKIA"]:
        assert check.feed(piece, False, no_deadline()).text == piece
        assert check.num_held_chars == 0


def test_a_finding_is_told_with_the_text_that_decides_it() -> None:
    """Reported once, with its place in the whole output."""
    result = run(plan(output='"pii.*" = "flag"'), ["mail a@", "b.co", " now", ""])
    assert [(f.category, f.start, f.end) for f in result.findings] == [("pii.email", 5, 11)]


def test_a_blocklist_holds_only_what_may_become_a_term() -> None:
    """The rest of the text is not late."""
    check = OutputCheck(BLOCK, 0, 1024)
    released = [
        check.feed(piece, False, no_deadline()).text for piece in ["a c", "at, ", "ca", "n "]
    ]
    assert released == ["a ", "cat, ", "", "can "]


def test_after_a_block_nothing_comes_out() -> None:
    """Not the word, not its beginning, not what follows."""
    check = OutputCheck(BLOCK, 3, 1024)
    first = check.feed("the can", False, no_deadline())
    second = check.feed("ary sings", False, no_deadline())
    third = check.feed(" on and on", True, no_deadline())
    assert (first.text, second.text, third.text) == ("the ", "", "")
    assert second.is_over
    assert [(f.part_idx, f.action) for f in second.findings] == [(3, Action.BLOCK)]
    assert check.num_scanned_chars == len("the canary sings on and on")
    assert check.num_released_chars == 4


def test_redaction_counts_original_characters() -> None:
    """So that a gateway knows what of its own text came out."""
    result = run(plan(output='"pii.*" = "redact"'), ["mail a@b.co now"])
    assert result.released == "mail [redacted pii.email] now"
    assert result.progress == [(15, 15)]


def test_no_time_stops_a_closed_policy() -> None:
    """Held text is dropped with the rest."""
    check = OutputCheck(BLOCK, 0, 1024)
    check.feed("a can", False, no_deadline())
    released = check.feed("ary", False, Deadline(SystemClock(), 0.0))
    verdict = check.verdict(released)
    assert verdict is not None
    assert (verdict.state, verdict.action) == (State.NOT_EVALUATED, Action.UNAVAILABLE)
    assert (verdict.reason, released.text, check.is_over) == (Reason.OUT_OF_TIME, "", True)


def test_no_time_lets_an_open_policy_pass_and_says_so() -> None:
    """What follows is judged again."""
    check = OutputCheck(
        plan(output='blocklist = "block"', terms=("canary",), fails_open=True), 0, 1024
    )
    check.feed("a can", False, no_deadline())
    released = check.feed(" be", False, Deadline(SystemClock(), 0.0))
    verdict = check.verdict(released)
    assert verdict is not None
    assert (verdict.state, verdict.action) == (State.NOT_EVALUATED, Action.ALLOW)
    assert released.text == "can be"
    assert check.feed(" a canary.", False, no_deadline()).is_over


def test_a_key_without_end_is_blocked_not_held_for_ever() -> None:
    """At the bound, what was found so far is enough."""
    result = run(
        plan(output='"secret.*" = "redact"'), ["-----BEGIN PRIVATE KEY-----", *["A" * 100] * 60]
    )
    assert result.released == ""
    assert [finding.action for finding in result.findings] == [Action.BLOCK]


def test_hidden_text_without_end_is_not_evaluated() -> None:
    """A word full of invisible characters is not waited for."""
    chunks = ["a can", *["\u200b" * 50] * 30]
    closed = run(BLOCK, chunks)
    assert (closed.released, closed.reasons, closed.is_over) == ("a ", [Reason.UNDECIDED], True)


def test_clean_pieces_have_no_verdict() -> None:
    """The contract: set when something was found or could not be judged."""
    check = OutputCheck(BLOCK, 0, 1024)
    assert check.verdict(check.feed("hello", True, no_deadline())) is None


def test_redacted_json_stays_json() -> None:
    """A number becomes a string where it is a member's value; however the text is cut."""
    redacting = plan(output='"pii.*" = "redact"')
    said = '{"card": 4111111111111111, "mail":"jo@mail.example.org", "n": 1} card: 4111111111111111'
    for size in (1, 3, 7, 100):
        chunks = [said[at : at + size] for at in range(0, len(said), size)]
        result = run(redacting, [*chunks, ""])
        value, _, rest = result.released.partition("} ")
        assert json.loads(value + "}") == {
            "card": "[redacted pii.card]",
            "mail": "[redacted pii.email]",
            "n": 1,
        }
        assert rest == "card: [redacted pii.card]"
