"""Verdicts: what was found, what is done about it, and "could not look" as a state of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, IntEnum

# More findings than these are acted on, but not listed.
MAX_LISTED_FINDINGS = 100


class Action(IntEnum):
    """What a policy does about a finding; a stronger one has a higher value."""

    # Not looked for.
    OFF = 0
    # Listed in the verdict, nothing else.
    ALLOW = 1
    FLAG = 2
    REDACT = 3
    # Could not look, and the policy is fail-closed.
    UNAVAILABLE = 4
    BLOCK = 5


class State(Enum):
    """Tri-state: NOT_EVALUATED is never CLEAN."""

    CLEAN = "clean"
    HIT = "hit"
    NOT_EVALUATED = "not_evaluated"


class Reason(Enum):
    """Why something could not be judged. Small: it is a metric label."""

    OPAQUE_PART = "a part is of a kind that nothing here reads"
    TOO_LONG = "the text is longer than the guard takes"
    OUT_OF_TIME = "the time was not enough"
    OVERLOADED = "too many long texts wait to be judged; who has most of them is refused first"
    UNKNOWN_POLICY = "the key names a policy that this guard does not have"
    BAD_BLOCKLIST = "the key's blocklist is too large"
    JUDGE_FAILED = "the judge gave no usable answer"
    NO_MODEL = "the policy asks for a trained classifier that this guard does not have"
    UNDECIDED = "a possible match stayed undecided for longer than text may be held"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found. Positions are code points of the original text, end exclusive."""

    category: str
    detector: str
    score: float
    # Index into the request's parts, or of the choice.
    part_idx: int
    start: int
    end: int
    action: Action
    # What would have been done if the category did not run in shadow.
    shadow_action: Action | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of one request, or of one piece of output."""

    state: State
    action: Action
    policy_version: str
    findings: tuple[Finding, ...] = field(default=())
    reason: Reason | None = None


def judge(
    findings: Iterable[Finding],
    policy_version: str,
    *,
    not_evaluated: Reason | None = None,
    fails_open: bool = False,
) -> Verdict:
    """Combine findings and a failure to look into one verdict.

    A block stands whatever else could not be seen; short of that, what could not be seen decides.

    Args:
        findings: what was found, in order.
        policy_version: what judged.
        not_evaluated: why some part was not judged, if so.
        fails_open: whether the policy lets pass what could not be judged.
    """
    listed = tuple(findings)
    action = max((finding.action for finding in listed), default=Action.ALLOW)
    state = State.HIT if listed else State.CLEAN
    if not_evaluated is not None and action is not Action.BLOCK:
        state = State.NOT_EVALUATED
        if not fails_open:
            action = Action.UNAVAILABLE
    return Verdict(state, action, policy_version, listed[:MAX_LISTED_FINDINGS], not_evaluated)
