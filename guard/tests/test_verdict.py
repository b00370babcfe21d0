"""How findings and failures to look become one verdict."""

import pytest

from headrace_guard.verdict import MAX_LISTED_FINDINGS, Action, Finding, Reason, State, judge


def finding(action: Action) -> Finding:
    return Finding("pii.email", "rule", 1.0, 0, 0, 5, action)


@pytest.mark.parametrize(
    ("actions", "missed", "fails_open", "state", "action"),
    [
        ([], None, False, State.CLEAN, Action.ALLOW),
        ([Action.FLAG], None, False, State.HIT, Action.FLAG),
        ([Action.FLAG, Action.REDACT], None, False, State.HIT, Action.REDACT),
        ([Action.ALLOW], None, False, State.HIT, Action.ALLOW),
        ([], Reason.OUT_OF_TIME, False, State.NOT_EVALUATED, Action.UNAVAILABLE),
        ([], Reason.OUT_OF_TIME, True, State.NOT_EVALUATED, Action.ALLOW),
        ([Action.REDACT], Reason.TOO_LONG, True, State.NOT_EVALUATED, Action.REDACT),
        ([Action.REDACT], Reason.TOO_LONG, False, State.NOT_EVALUATED, Action.UNAVAILABLE),
        ([Action.BLOCK], Reason.TOO_LONG, False, State.HIT, Action.BLOCK),
        ([Action.BLOCK], Reason.TOO_LONG, True, State.HIT, Action.BLOCK),
    ],
)
def test_the_strongest_decides(
    actions: list[Action], missed: Reason | None, fails_open: bool, state: State, action: Action
) -> None:
    """A block stands; short of it "could not look" is never clean."""
    found = [finding(one) for one in actions]
    verdict = judge(found, "v", not_evaluated=missed, fails_open=fails_open)
    assert (verdict.state, verdict.action) == (state, action)


def test_a_flood_of_findings_is_cut_but_counts() -> None:
    """A listed finding costs bytes; one that is not listed still decides."""
    found = [finding(Action.FLAG)] * (MAX_LISTED_FINDINGS + 5) + [finding(Action.BLOCK)]
    verdict = judge(found, "v")
    assert len(verdict.findings) == MAX_LISTED_FINDINGS
    assert verdict.action is Action.BLOCK
