"""A guard without rules: a blocklist of plain substrings, and the whole contract around it.

What it releases and says follows the same contract as the real service; the conformance suite
(tests/contract/test_guard_conformance.py) runs against both.

    async with FakeGuardServer(FakeGuard(blocklist=["canary"])) as server:
        client = SessionClient(server.address)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from headrace_common.errors import InvalidRequest, Unavailable
from headrace_common.rpc import Call
from headrace_common.rpc_server import RpcServer
from headrace_contracts.guard.v1 import guard_pb2 as pb

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["Guard"]
VERSION = "fake/1"


@dataclass
class Switches:
    """What goes wrong. Change at any time; running checks see it."""

    # Time before each answer.
    delay_s: float = 0.0
    # Every verdict is NOT_EVALUATED / UNAVAILABLE.
    cannot_look: bool = False
    # Every call fails.
    refuse: bool = False
    # No answer comes any more, until the caller leaves.
    hang: bool = False


@dataclass
class _Choice:
    """One choice under way."""

    text: str = ""
    num_released: int = 0
    # At another guard.
    num_out: int = 0
    is_over: bool = False
    has_ended: bool = False


@dataclass
class FakeGuard:
    """Guard servicer that blocks substrings, in any case, in both directions.

    Args:
        blocklist: substrings blocked for everybody, beside each key's own.
        redacts: hits are replaced by "[redacted blocklist]" instead of blocked.
        policies: names that exist; others are not evaluated.
    """

    blocklist: list[str] = field(default_factory=list)
    redacts: bool = False
    policies: frozenset[str] = frozenset({"", "default", "public", "strict", "off"})
    switches: Switches = field(default_factory=Switches)
    # For tests to look at: every input request, every opened output, every gateway's report.
    inputs: list[pb.CheckInputRequest] = field(default_factory=list)
    opened: list[pb.OutputOpen] = field(default_factory=list)
    reports: list[pb.SentReport] = field(default_factory=list)

    async def CheckInput(  # noqa: N802 - contract name
        self, request: pb.CheckInputRequest, _call: Call
    ) -> pb.CheckInputResponse:
        """Judge a whole request."""
        self.inputs.append(request)
        await self._obstruct()
        terms = self._terms(request.policy)
        findings = [
            self._finding(idx, start, end)
            for idx, part in enumerate(request.parts)
            for start, end in _spans(part.text, terms)
        ]
        missed = "a part cannot be read" if request.opaque_paths else ""
        verdict = self._verdict(request.policy, findings, missed)
        redacted = {
            finding.part_idx: _redacted(request.parts[finding.part_idx].text, terms)
            for finding in findings
            if verdict.action == pb.ACTION_REDACT
        }
        return pb.CheckInputResponse(verdict=verdict, redacted_parts=redacted)

    async def CheckOutput(  # noqa: N802 - contract name
        self, requests: AsyncIterator[pb.CheckOutputRequest], _call: Call
    ) -> AsyncIterator[pb.CheckOutputResponse]:
        """Judge the choices of one output."""
        opened: pb.OutputOpen | None = None
        choices: dict[int, _Choice] = {}
        async for request in requests:
            await self._obstruct()
            kind = request.WhichOneof("kind")
            if kind == "open" and opened is None:
                opened = request.open
                self.opened.append(opened)
            elif kind == "text" and opened is not None:
                choice = choices.setdefault(request.text.choice_idx, _Choice())
                yield self._output(opened.policy, choice, request.text)
            elif kind == "resume" and opened and request.resume.choice_idx not in choices:
                num_out = request.resume.released_chars
                choices[request.resume.choice_idx] = _Choice(num_out=num_out)
            else:
                raise InvalidRequest(f"CheckOutput: {kind} out of turn")

    async def Moderate(  # noqa: N802 - contract name
        self, request: pb.ModerateRequest, _call: Call
    ) -> pb.ModerateResponse:
        """Score texts: 1 for the blocklist if a substring of it is in the text, else 0."""
        await self._obstruct()
        terms = self._terms(pb.PolicyRef())
        answer = pb.ModerateResponse(model_version=VERSION)
        for text in request.texts:
            is_hit = bool(_spans(text, terms))
            scores = answer.results.add(flagged=["blocklist"] if is_hit else [])
            scores.scores["blocklist"] = float(is_hit)
            scores.not_evaluated = "told so" if self.switches.cannot_look else ""
        return answer

    async def ReportSent(  # noqa: N802 - contract name
        self, request: pb.SentReport, _call: Call
    ) -> pb.SentReportResponse:
        """Keep a gateway's report."""
        await self._obstruct()
        self.reports.append(request)
        return pb.SentReportResponse()

    async def ReportSentMany(  # noqa: N802 - contract name
        self, request: pb.SentReports, _call: Call
    ) -> pb.SentReportResponse:
        """Keep a gateway's reports."""
        await self._obstruct()
        self.reports.extend(request.reports)
        return pb.SentReportResponse()

    def _output(
        self, ref: pb.PolicyRef, choice: _Choice, text: pb.OutputText
    ) -> pb.CheckOutputResponse:
        if choice.has_ended:
            raise InvalidRequest(f"CheckOutput: choice {text.choice_idx} has ended")
        choice.text += text.text
        choice.has_ended = text.last
        released, verdict = "", None
        if not choice.is_over:
            released, verdict = self._judge(ref, choice, text)
        return pb.CheckOutputResponse(
            choice_idx=text.choice_idx,
            released=released,
            verdict=verdict,
            last=choice.is_over,
            scanned_chars=len(choice.text),
            released_chars=choice.num_released,
        )

    def _judge(
        self, ref: pb.PolicyRef, choice: _Choice, text: pb.OutputText
    ) -> tuple[str, pb.Verdict | None]:
        terms = self._terms(ref)
        choice.is_over = text.last
        if self.switches.cannot_look or ref.policy not in self.policies:
            choice.is_over = True
            return "", self._verdict(ref, [], "")
        begin = choice.num_released
        end = len(choice.text) if text.last else _live_from(choice.text, begin, terms)
        spans = [span for span in _spans(choice.text, terms) if begin <= span[0] and span[1] <= end]
        if spans and not self.redacts:
            spans, end = spans[:1], spans[0][0]
            choice.is_over = True
        choice.num_released = end
        released = choice.text[max(begin, min(choice.num_out, end)) : end]
        if not spans:
            return released, None
        findings = [self._finding(text.choice_idx, *span) for span in spans]
        shown = _redacted(released, terms) if self.redacts else released
        return shown, self._verdict(ref, findings, "")

    def _verdict(self, ref: pb.PolicyRef, findings: list[pb.Finding], missed: str) -> pb.Verdict:
        verdict = pb.Verdict(policy_version=VERSION, findings=findings, elapsed_s=1e-6)
        if self.switches.cannot_look:
            missed = "told so"
        if ref.policy not in self.policies:
            missed = "no such policy"
        if missed and not (findings and not self.redacts):
            verdict.state = pb.VERDICT_STATE_NOT_EVALUATED
            verdict.action, verdict.reason = pb.ACTION_UNAVAILABLE, missed
        elif findings:
            verdict.state, verdict.action = pb.VERDICT_STATE_HIT, self._action()
        else:
            verdict.state, verdict.action = pb.VERDICT_STATE_CLEAN, pb.ACTION_ALLOW
        return verdict

    def _finding(self, part_idx: int, start: int, end: int) -> pb.Finding:
        return pb.Finding(
            category="blocklist",
            detector="fake",
            score=1.0,
            part_idx=part_idx,
            start=start,
            end=end,
            action=self._action(),
        )

    def _action(self) -> pb.Action.ValueType:
        return pb.ACTION_REDACT if self.redacts else pb.ACTION_BLOCK

    def _terms(self, ref: pb.PolicyRef) -> list[str]:
        if ref.policy == "off":
            return []
        return [term.lower() for term in [*self.blocklist, *ref.blocklist] if term]

    async def _obstruct(self) -> None:
        if self.switches.hang:
            await asyncio.Event().wait()
        if self.switches.delay_s:
            await asyncio.sleep(self.switches.delay_s)
        if self.switches.refuse:
            raise Unavailable("The fake guard was told to refuse.")


def _spans(text: str, terms: list[str]) -> list[tuple[int, int]]:
    """Occurrences of the terms, first ones first, none inside another."""
    lowered = text.lower()
    found = sorted(
        (at, -len(term))
        for term in terms
        for at in range(len(lowered))
        if lowered.startswith(term, at)
    )
    spans: list[tuple[int, int]] = []
    for start, minus_length in found:
        if not spans or start >= spans[-1][1]:
            spans.append((start, start - minus_length))
    return spans


def _live_from(text: str, begin: int, terms: list[str]) -> int:
    lowered = text.lower()
    for start in range(begin, len(text)):
        tail = lowered[start:]
        if any(term.startswith(tail) and term != tail for term in terms):
            return start
    return len(text)


def _redacted(text: str, terms: list[str]) -> str:
    for start, end in reversed(_spans(text, terms)):
        text = text[:start] + "[redacted blocklist]" + text[end:]
    return text


class FakeGuardServer:
    """A fake guard behind a real `RpcServer` on a free port. Use as an async context manager."""

    def __init__(self, guard: FakeGuard | None = None, address: str = "127.0.0.1:0") -> None:
        self.guard = guard or FakeGuard()
        self._server = RpcServer(address, [(DESCRIPTOR, self.guard)])

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self._server.port}"

    async def kill(self) -> None:
        """Cut all connections at once, as a SIGKILL would."""
        await self._server.stop(0)

    async def __aenter__(self) -> FakeGuardServer:
        await self._server.start()
        await self._server.set_ready(True)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._server.stop(0)
