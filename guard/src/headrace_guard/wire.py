"""Between the guard's own types and its contract."""

from __future__ import annotations

from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_guard.classifiers.text_model import Trust
from headrace_guard.verdict import Action, Finding, State, Verdict

_ACTIONS = {
    Action.ALLOW: pb.ACTION_ALLOW,
    Action.FLAG: pb.ACTION_FLAG,
    Action.REDACT: pb.ACTION_REDACT,
    Action.UNAVAILABLE: pb.ACTION_UNAVAILABLE,
    Action.BLOCK: pb.ACTION_BLOCK,
}
_STATES = {
    State.CLEAN: pb.VERDICT_STATE_CLEAN,
    State.HIT: pb.VERDICT_STATE_HIT,
    State.NOT_EVALUATED: pb.VERDICT_STATE_NOT_EVALUATED,
}
_TRUSTS = {
    pb.TRUST_OWNER: Trust.OWNER,
    pb.TRUST_USER: Trust.USER,
    pb.TRUST_MODEL: Trust.MODEL,
    pb.TRUST_UNTRUSTED: Trust.UNTRUSTED,
}


def action_of(action: Action) -> pb.Action.ValueType:
    """Render an action."""
    return _ACTIONS[action]


def state_of(state: State) -> pb.VerdictState.ValueType:
    """Render a state."""
    return _STATES[state]


def trust_of(trust: pb.Trust.ValueType) -> Trust:
    """Read who a text comes from; who does not say so is not trusted."""
    return _TRUSTS.get(trust, Trust.UNTRUSTED)


def verdict_message(verdict: Verdict, elapsed_s: float) -> pb.Verdict:
    """Render a verdict."""
    return pb.Verdict(
        state=_STATES[verdict.state],
        action=_ACTIONS[verdict.action],
        findings=[_finding_message(finding) for finding in verdict.findings],
        reason=verdict.reason.value if verdict.reason else "",
        policy_version=verdict.policy_version,
        elapsed_s=elapsed_s,
    )


def _finding_message(finding: Finding) -> pb.Finding:
    shadow = finding.shadow_action
    return pb.Finding(
        category=finding.category,
        detector=finding.detector,
        score=finding.score,
        part_idx=finding.part_idx,
        start=finding.start,
        end=finding.end,
        action=_ACTIONS[finding.action],
        shadow_action=pb.ACTION_UNSPECIFIED if shadow is None else _ACTIONS[shadow],
    )
