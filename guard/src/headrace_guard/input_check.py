"""Judges a whole request before it is dispatched: every part, of whatever role.

A part is judged as it stands (in all its views, see `headrace_guard.normalise`), and whatever is
encoded in it on its own. The borders between parts are looked at too, as a word may be split over
several messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from headrace_guard.classifiers.base import Match
from headrace_guard.classifiers.text_model import Trust
from headrace_guard.deadline import Deadline, OutOfTimeError
from headrace_guard.decode import Decoded, decoded, placed
from headrace_guard.normalise import Window
from headrace_guard.plan import Plan
from headrace_guard.redact import redact
from headrace_guard.verdict import Action, Finding, Reason, Verdict, judge

# How many borders between parts are looked at, from the end, and how much on either side: of the
# last ones, which no earlier request had, and of those before.
MAX_BORDERS, _LAST_BORDERS = 64, 2
_BORDER_CHARS, _EARLY_BORDER_CHARS = 256, 64
# Between the surroundings of two borders that are searched in one go, and how much that is: others
# wait meanwhile.
_APART, _SEARCH_CHARS = "\n\n", 2048
# A word may lie in pieces over so many parts, if those between are no longer than that.
_MAX_RUN, _PIECE_CHARS = 6, 16
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


def check_borders(plan: Plan, parts: Sequence[Part], deadline: Deadline) -> Iterator[list[Finding]]:
    """Look for what is split over parts in a row; each piece is a finding of its own.

    Yields:
        What a few thousand characters held, as far as the search has come.

    Raises:
        OutOfTimeError: the time is over.
    """
    last = max(0, len(parts) - 1 - _LAST_BORDERS)
    early = range(max(0, len(parts) - 1 - MAX_BORDERS), last)
    for join in _JOINS:
        seams = (one for idx in early for one in _seams(parts, idx, _EARLY_BORDER_CHARS, join))
        for some in _gathered(seams):
            yield _search(plan, parts, some, deadline)
        for one in (
            one
            for idx in range(last, len(parts) - 1)
            for one in _seams(parts, idx, _BORDER_CHARS, join)
        ):
            found = _matches(plan, one.text, deadline)
            for piece in () if join else decoded(one.text).pieces:
                found += (placed(match, piece) for match in _matches(plan, piece.text, deadline))
            yield [half for match in found for half in _pieces(plan, parts, one, match)]


def _gathered(seams: Iterable[_Seam]) -> Iterator[list[_Seam]]:
    """Put seams together that are searched in one go."""
    some: list[_Seam] = []
    num_chars = 0
    for one in seams:
        some.append(one)
        num_chars += len(one.text)
        if num_chars >= _SEARCH_CHARS:
            yield some
            some, num_chars = [], 0
    if some:
        yield some


def _search(
    plan: Plan, parts: Sequence[Part], seams: Sequence[_Seam], deadline: Deadline
) -> list[Finding]:
    matches = _matches(plan, _APART.join(one.text for one in seams), deadline)
    findings: list[Finding] = []
    offset = 0
    for one in seams:
        end = offset + len(one.text)
        for match in matches:
            if offset <= match.start and match.end <= end:
                mine = replace(match, start=match.start - offset, end=match.end - offset)
                findings += _pieces(plan, parts, one, mine)
        offset = end + len(_APART)
    return findings


@dataclass(frozen=True, slots=True)
class _Seam:
    """Parts in a row as one text.

    Args:
        first: index of the first of them.
        text: what they say, and some of what stands before and behind.
        starts: where each begins in it; negative: before it.
    """

    first: int
    text: str
    starts: tuple[int, ...]


def _seams(parts: Sequence[Part], idx: int, size: int, join: str) -> Iterator[_Seam]:
    """Yield runs of parts from *idx* on: two, and more while those between are short."""
    for stop in range(idx + 2, min(len(parts), idx + _MAX_RUN) + 1):
        yield _seam(parts, idx, stop, size, join)
        if join or len(parts[stop - 1].text) > _PIECE_CHARS:
            break


def _seam(parts: Sequence[Part], idx: int, stop: int, size: int, join: str) -> _Seam:
    before, behind = "", ""
    for part in reversed(parts[:idx]):
        if len(before) + len(parts[idx].text) >= size:
            break
        before = f"{part.text[-size:]} {before}"
    for part in parts[stop:]:
        if len(behind) + len(parts[stop - 1].text) >= size:
            break
        behind += f" {part.text[:size]}"
    text = before[-size:]
    starts: list[int] = []
    for part in parts[idx:stop]:
        shown = part.text[-size:] if not starts else part.text[:size]
        text += join if starts else ""
        starts.append(len(text) - (0 if starts else len(part.text) - len(shown)))
        text += shown
    return _Seam(idx, text + behind[:size], tuple(starts))


def _pieces(plan: Plan, parts: Sequence[Part], seam: _Seam, match: Match) -> list[Finding]:
    """Return what of a match lies in each of the parts, if it lies in several."""
    touched = [
        (idx, start, start + len(parts[idx].text))
        for idx, start in enumerate(seam.starts, seam.first)
        if match.start < start + len(parts[idx].text) and match.end > start
    ]
    if len(touched) < 2 or not all(allowed(plan, parts[idx], [match]) for idx, *_ in touched):
        return []
    return [
        plan.finding(
            replace(match, start=max(0, match.start - start), end=min(match.end, end) - start), idx
        )
        for idx, start, end in touched
    ]


def combine(
    plan: Plan, parts: Sequence[Part], findings: Sequence[Finding], missed: Reason | None
) -> InputResult:
    """Say what findings mean for the request."""
    policy = plan.policy
    verdict = judge(findings, policy.version, not_evaluated=missed, fails_open=policy.fails_open)
    return InputResult(verdict, _redacted(parts, findings, verdict.action))


def allowed(plan: Plan, part: Part, matches: Iterable[Match]) -> list[Match]:
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
