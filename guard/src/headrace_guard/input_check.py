"""Judges a whole request before it is dispatched: every part, of whatever role.

A part is judged as it stands (in all its views, see `headrace_guard.normalise`), and whatever is
encoded in it on its own. The borders between the last parts are looked at too, as a word may be
split over two messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from headrace_guard.classifiers.base import Match
from headrace_guard.classifiers.text_model import Trust
from headrace_guard.deadline import Deadline, OutOfTimeError
from headrace_guard.decode import Decoded, decoded, placed
from headrace_guard.normalise import Window
from headrace_guard.plan import Plan
from headrace_guard.redact import redact
from headrace_guard.verdict import Action, Finding, Reason, Verdict, judge

# How many borders between parts are looked at, from the end, and how much on either side.
MAX_BORDERS = 2
_BORDER_CHARS = 256
# What may stand between two parts once they are one text.
_JOINS = ("", " ")


@dataclass(frozen=True, slots=True)
class Part:
    """One text of a request and who it comes from."""

    text: str
    trust: Trust

    @property
    def is_owners(self) -> bool:
        """Whether it comes from the key's owner (system text, tool definitions)."""
        return self.trust is Trust.OWNER


@dataclass(frozen=True, slots=True)
class PartResult:
    """What was found in one part; positions are those of its text.

    Args:
        matches: in any order.
        missed: why something of it was not judged.
        pieces: texts that it holds in encoded form.
    """

    matches: tuple[Match, ...] = ()
    missed: Reason | None = None
    pieces: tuple[Decoded, ...] = ()


@dataclass(frozen=True, slots=True)
class InputResult:
    """The verdict, and the new text of each part that a redaction changed."""

    verdict: Verdict
    redacted_parts: dict[int, str]


def check_part(plan: Plan, part: Part, deadline: Deadline) -> PartResult:
    """Judge one part with rules and blocklists.

    Args:
        plan: what to look for.
        part: the text.
        deadline: when to stop; then the result says so.
    """
    found: list[Match] = []
    missed: Reason | None = None
    pieces: tuple[Decoded, ...] = ()
    try:
        found += _matches(plan, part.text, deadline)
        decoding = decoded(part.text)
        pieces = decoding.pieces
        missed = None if decoding.is_complete else Reason.TOO_LONG
        for piece in pieces:
            found += (placed(match, piece) for match in _matches(plan, piece.text, deadline))
    except OutOfTimeError:
        missed = Reason.OUT_OF_TIME
    return PartResult(tuple(allowed(plan, part, found)), missed, pieces)


def check_borders(plan: Plan, parts: Sequence[Part], deadline: Deadline) -> list[Finding]:
    """Look for what is split over two parts; each half becomes a finding of its own.

    Raises:
        OutOfTimeError: the time is over.
    """
    findings: list[Finding] = []
    for idx in range(max(1, len(parts) - MAX_BORDERS), len(parts)):
        first, second = parts[idx - 1], parts[idx]
        tail, head = first.text[-_BORDER_CHARS:], second.text[:_BORDER_CHARS]
        for join in _JOINS:
            found = _matches(plan, tail + join + head, deadline)
            border, behind = len(tail), len(tail) + len(join)
            for match in allowed(plan, first, allowed(plan, second, found)):
                if match.start < border and match.end > behind:
                    offset = len(first.text) - border
                    left = replace(match, start=match.start + offset, end=len(first.text))
                    right = replace(match, start=0, end=match.end - behind)
                    findings += plan.finding(left, idx - 1), plan.finding(right, idx)
    return findings


def combine(
    plan: Plan, parts: Sequence[Part], findings: Sequence[Finding], missed: Reason | None
) -> InputResult:
    """Say what findings mean for the request."""
    policy = plan.policy
    verdict = judge(findings, policy.version, not_evaluated=missed, fails_open=policy.fails_open)
    return InputResult(verdict, _redacted(parts, findings, verdict.action))


def allowed(plan: Plan, part: Part, matches: Sequence[Match] | Iterator[Match]) -> list[Match]:
    """Leave out what the policy does not mind in the text of the key's owner."""
    if not part.is_owners:
        return list(matches)
    return [match for match in matches if match.category not in plan.policy.owner_exempt]


def _matches(plan: Plan, text: str, deadline: Deadline) -> list[Match]:
    window = Window(text)
    found: list[Match] = []
    for classifier in plan.all_classifiers:
        deadline.check()
        found += classifier.find(window)
    return found


def _redacted(parts: Sequence[Part], findings: Sequence[Finding], action: Action) -> dict[int, str]:
    spans: dict[int, list[Finding]] = {}
    if action is Action.BLOCK:
        return {}
    for finding in findings:
        if finding.action is Action.REDACT:
            spans.setdefault(finding.part_idx, []).append(finding)
    return {idx: redact(parts[idx].text, found) for idx, found in spans.items()}
