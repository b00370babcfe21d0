"""Judges a whole request before it is dispatched: every part, of whatever role."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace_guard.classifiers.base import Match
from headrace_guard.deadline import Deadline, OutOfTimeError
from headrace_guard.normalise import Window
from headrace_guard.plan import Plan
from headrace_guard.redact import redact
from headrace_guard.verdict import Action, Finding, Reason, Verdict, judge


@dataclass(frozen=True, slots=True)
class Part:
    """One text of a request.

    Args:
        text: the text.
        is_owners: it comes from the key's owner (system text, tool definitions).
    """

    text: str
    is_owners: bool


@dataclass(frozen=True, slots=True)
class InputResult:
    """The verdict, and the new text of each part that a redaction changed."""

    verdict: Verdict
    redacted_parts: dict[int, str]


def check_input(
    plan: Plan, parts: Sequence[Part], missed: Reason | None, max_chars: int, deadline: Deadline
) -> InputResult:
    """Judge the parts of one request.

    What could not be looked at never makes a clean verdict; a block found before stands.

    Args:
        plan: what to look for.
        parts: all texts of the request.
        missed: why something of the request cannot be judged, as far as is known already.
        max_chars: most characters of all parts together.
        deadline: when to stop.
    """
    findings: list[Finding] = []
    if plan.all_classifiers and sum(len(part.text) for part in parts) > max_chars:
        missed = Reason.TOO_LONG
    else:
        try:
            for idx, part in enumerate(parts):
                findings += (plan.finding(match, idx) for match in _matches(plan, part, deadline))
        except OutOfTimeError:
            missed = Reason.OUT_OF_TIME
    verdict = judge(
        findings,
        plan.policy.version,
        not_evaluated=missed,
        fails_open=plan.policy.fails_open,
    )
    return InputResult(verdict, _redacted(parts, findings, verdict.action))


def _matches(plan: Plan, part: Part, deadline: Deadline) -> Iterator[Match]:
    window = Window(part.text)
    for classifier in plan.all_classifiers:
        deadline.check()
        for match in classifier.find(window):
            if not (part.is_owners and match.category in plan.policy.owner_exempt):
                yield match


def _redacted(parts: Sequence[Part], findings: Sequence[Finding], action: Action) -> dict[int, str]:
    spans: dict[int, list[Finding]] = {}
    if action is Action.BLOCK:
        return {}
    for finding in findings:
        if finding.action is Action.REDACT:
            spans.setdefault(finding.part_idx, []).append(finding)
    return {idx: redact(parts[idx].text, found) for idx, found in spans.items()}
