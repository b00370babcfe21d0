"""What the audit says about one judgement: never the text, unless the policy says so."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_guard.moderation import Scores
from headrace_guard.output_session import ChoiceLog
from headrace_guard.plan import Plan
from headrace_guard.verdict import Finding, State, Verdict
from headrace_guard.wire import action_of, state_of

# Longest span kept under a policy that keeps text. Characters.
_MAX_KEPT_SPAN = 200


@dataclass(frozen=True, slots=True)
class Subject:
    """Whose request it is, and what judged it."""

    request_id: str
    tenant_id: str
    key_id: str
    plan: Plan
    model_version: str = ""


class RecordMaker:
    """Makes audit records, without place in the chain and time.

    Args:
        span_key: for the keyed hash of what was found.
    """

    def __init__(self, span_key: bytes) -> None:
        self._span_key = span_key

    def input(
        self,
        subject: Subject,
        verdict: Verdict,
        parts: Sequence[pb.TextPart],
        elapsed_s: float,
    ) -> pb.AuditRecord:
        """Say how a whole request was judged."""
        record = self._base(pb.AUDIT_KIND_INPUT, subject, verdict, elapsed_s)
        record.scanned_chars = sum(len(part.text) for part in parts)
        for finding in verdict.findings:
            part = parts[finding.part_idx]
            span = part.text[finding.start : finding.end]
            record.findings.append(self._finding(subject.plan, finding, span, part.path))
        return record

    def output(self, subject: Subject, choice_idx: int, log: ChoiceLog) -> pb.AuditRecord:
        """Say how one choice was judged from its beginning to its end."""
        verdict = log.verdict(subject.plan)
        record = self._base(pb.AUDIT_KIND_OUTPUT, subject, verdict, log.elapsed_s)
        record.choice_idx = choice_idx
        record.scanned_chars = log.check.num_scanned_chars
        record.released_chars = log.check.num_released_chars
        record.released_text_chars = log.check.num_text_chars
        record.resumed_chars = log.check.num_out_chars
        text = "".join(log.texts) if verdict.findings else ""
        for finding in verdict.findings:
            span = text[finding.start : finding.end]
            record.findings.append(self._finding(subject.plan, finding, span, ""))
        return record

    def moderation(
        self,
        request: pb.ModerateRequest,
        scores: Sequence[Scores],
        model_version: str,
        elapsed_s: float,
    ) -> pb.AuditRecord:
        """Say what was flagged in the texts of a call that only wants scores; spans are texts."""
        missed = next((one.missed for one in scores if one.missed is not None), None)
        is_hit = any(one.flagged for one in scores)
        seen = State.HIT if is_hit else State.CLEAN
        record = pb.AuditRecord(
            kind=pb.AUDIT_KIND_MODERATION,
            request_id=request.request_id,
            tenant_id=request.tenant_id,
            key_id=request.key_id,
            model_version=model_version,
            state=state_of(State.NOT_EVALUATED if missed is not None else seen),
            action=pb.ACTION_FLAG if is_hit else pb.ACTION_ALLOW,
            reason=missed.value if missed is not None else "",
            scanned_chars=sum(map(len, request.texts)),
            elapsed_s=elapsed_s,
        )
        for idx, (text, one) in enumerate(zip(request.texts, scores, strict=True)):
            for category in sorted(one.flagged):
                record.findings.add(
                    category=category,
                    detector="moderate",
                    score=one.by_category.get(category, 1.0),
                    path=f"input[{idx}]",
                    end=len(text),
                    action=pb.ACTION_FLAG,
                    span_hmac=self._hmac(text),
                )
        return record

    def sent(self, report: pb.SentReport) -> pb.AuditRecord:
        """Say what the gateway sent."""
        return pb.AuditRecord(
            kind=pb.AUDIT_KIND_SENT,
            request_id=report.request_id,
            tenant_id=report.tenant_id,
            key_id=report.key_id,
            released_chars=report.sent_chars,
            released_chars_by_choice=report.sent_chars_by_choice,
            fail_open=report.fail_open,
            guard_lost=report.guard_lost,
        )

    def _base(
        self, kind: pb.AuditKind.ValueType, subject: Subject, verdict: Verdict, elapsed_s: float
    ) -> pb.AuditRecord:
        policy = subject.plan.policy
        return pb.AuditRecord(
            kind=kind,
            request_id=subject.request_id,
            tenant_id=subject.tenant_id,
            key_id=subject.key_id,
            policy=policy.name,
            policy_version=policy.version,
            model_version=subject.model_version,
            state=state_of(verdict.state),
            action=action_of(verdict.action),
            reason=verdict.reason.value if verdict.reason else "",
            elapsed_s=elapsed_s,
            fail_open=policy.fails_open and verdict.state is State.NOT_EVALUATED,
        )

    def _finding(self, plan: Plan, finding: Finding, span: str, path: str) -> pb.AuditFinding:
        shadow = finding.shadow_action
        return pb.AuditFinding(
            category=finding.category,
            detector=finding.detector,
            score=finding.score,
            path=path,
            start=finding.start,
            end=finding.end,
            action=action_of(finding.action),
            shadow_action=pb.ACTION_UNSPECIFIED if shadow is None else action_of(shadow),
            span_hmac=self._hmac(span),
            text=span[:_MAX_KEPT_SPAN] if plan.policy.keeps_text else "",
        )

    def _hmac(self, span: str) -> bytes:
        return hmac.digest(self._span_key, span.encode("utf-8", "surrogatepass"), hashlib.sha256)
