"""Every state and action of a verdict has its place in the contract."""

import pytest

from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_guard.verdict import Action, Finding, Reason, State, Verdict
from headrace_guard.wire import verdict_message


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("action", [action for action in Action if action is not Action.OFF])
def test_names_are_those_of_the_contract(state: State, action: Action) -> None:
    """None is lost or swapped."""
    message = verdict_message(Verdict(state, action, "v1", reason=Reason.TOO_LONG), 0.5)
    assert pb.VerdictState.Name(message.state) == f"VERDICT_STATE_{state.name}"
    assert pb.Action.Name(message.action) == f"ACTION_{action.name}"
    assert (message.reason, message.policy_version, message.elapsed_s) == (
        Reason.TOO_LONG.value, "v1", 0.5,
    )  # fmt: skip


def test_a_finding_goes_over_whole() -> None:
    """All fields."""
    found = Finding("pii.card", "rule.pii.card/1", 0.5, 3, 10, 29, Action.FLAG)
    (message,) = verdict_message(Verdict(State.HIT, Action.FLAG, "v", (found,)), 0.0).findings
    assert (message.category, message.detector, message.score) == (
        "pii.card",
        "rule.pii.card/1",
        0.5,
    )
    assert (message.part_idx, message.start, message.end) == (3, 10, 29)
    assert message.action == pb.ACTION_FLAG
