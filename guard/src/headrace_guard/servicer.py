"""The Guard service: picks what looks, where it runs, and what is said when it cannot look."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from headrace_common.clock import Clock
from headrace_common.errors import InvalidRequest
from headrace_common.fair_places import NoPlaceError
from headrace_common.rpc import Call
from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_guard.audit_record import RecordMaker, Subject
from headrace_guard.classifiers.blocklist import BlocklistTooLargeError
from headrace_guard.classifiers.text_model import TextModels
from headrace_guard.cpu_pool import INLINE_CHARS, CpuPool, Turns
from headrace_guard.deadline import Deadline
from headrace_guard.input_check import Part
from headrace_guard.input_judge import InputJudge, Question
from headrace_guard.metrics import GuardMetrics
from headrace_guard.moderation import Moderator
from headrace_guard.output_check import Released
from headrace_guard.output_session import ChoiceLog, OutputSession
from headrace_guard.plan import Plan, Planner
from headrace_guard.policy import Direction, Policy
from headrace_guard.verdict import Finding, Reason, State, Verdict
from headrace_guard.wire import trust_of, verdict_message

# Share of the caller's remaining time that is used, so that the answer still arrives.
_USED_TIME_RATIO = 0.8
# Most texts of one call of Moderate.
_MAX_MODERATED_TEXTS = 128
# What a key gets whose policy does not exist: nothing passes.
_NO_POLICY = Policy(
    "", "unknown", False, (), frozenset(), {direction: {} for direction in Direction}
)


class Audit(Protocol):
    """Takes down what was judged."""

    def note(self, record: pb.AuditRecord) -> None:
        """Take a record down; never waits."""
        ...


@dataclass(frozen=True)
class Limits:
    """How much one check may take.

    Args:
        check_budget_s: most time for one request or one piece of output.
        max_input_chars: longest request.
        max_held_chars: most undecided output of one choice.
    """

    check_budget_s: float
    max_input_chars: int
    max_held_chars: int


@dataclass(frozen=True)
class Tools:
    """What the servicer works with.

    Args:
        planner: policies, ready to run.
        judge: judges whole requests.
        moderator: scores texts.
        models: trained classifiers; None = none are there.
        pool: threads for long texts.
        audit: takes everything down.
        records: makes audit records.
    """

    planner: Planner
    judge: InputJudge
    moderator: Moderator
    models: TextModels | None
    pool: CpuPool
    audit: Audit
    records: RecordMaker


@dataclass(frozen=True)
class _Prepared:
    """What looks for whom, or why nothing can."""

    tenant_id: str
    plan: Plan
    missed: Reason | None


class GuardServicer:
    """Guard contract. Short texts are judged on the event loop, long ones on threads.

    Args:
        tools: what does the work.
        limits: bounds of one check.
        clock: source of time.
        metrics: where verdicts are counted.
    """

    def __init__(self, tools: Tools, limits: Limits, clock: Clock, metrics: GuardMetrics) -> None:
        self._tools, self._limits = tools, limits
        self._clock, self._metrics = clock, metrics

    async def CheckInput(  # noqa: N802 - contract name
        self, request: pb.CheckInputRequest, call: Call
    ) -> pb.CheckInputResponse:
        """Judge a whole request."""
        started_s = self._clock.now_s()
        prepared = self._prepare(request, Direction.INPUT)
        plan, missed = prepared.plan, prepared.missed
        # A policy that looks for nothing has nothing left unseen.
        if missed is None and request.opaque_paths and plan.looks:
            missed = Reason.OPAQUE_PART
        parts = [Part(part.text, trust_of(part.trust)) for part in request.parts]
        question = Question(plan, request.tenant_id, parts, missed)
        result = await self._tools.judge.judge(question, self._deadline(call))
        elapsed_s = self._clock.now_s() - started_s
        self._count(Direction.INPUT, result.verdict, plan.policy, elapsed_s)
        subject = self._subject(request, plan)
        record = self._tools.records.input(subject, result.verdict, request.parts, elapsed_s)
        self._tools.audit.note(record)
        return pb.CheckInputResponse(
            verdict=verdict_message(result.verdict, elapsed_s),
            redacted_parts=result.redacted_parts,
        )

    async def CheckOutput(  # noqa: N802 - contract name
        self, requests: AsyncIterator[pb.CheckOutputRequest], call: Call
    ) -> AsyncIterator[pb.CheckOutputResponse]:
        """Judge the choices of one output; one answer per piece of text.

        Raises:
            InvalidRequest: the messages do not follow the contract.
        """
        prepared: _Prepared | None = None
        session: OutputSession | None = None
        subject: Subject | None = None
        try:
            async for request in requests:
                match request.WhichOneof("kind"):
                    case "open" if prepared is None:
                        prepared = self._prepare(request.open, Direction.OUTPUT)
                        subject = self._subject(request.open, prepared.plan)
                        max_held_chars = self._limits.max_held_chars
                        models = self._tools.models
                        session = OutputSession(prepared.plan, max_held_chars, models)
                    case "text" if prepared is not None and session is not None:
                        log = session.choice(request.text)
                        yield await self._check_output(prepared, log, request.text, call)
                    case "resume" if session is not None:
                        session.resume(request.resume)
                    case kind:
                        what = kind or "an empty message"
                        raise InvalidRequest(f"CheckOutput: {what} out of turn")
        finally:
            if session is not None and subject is not None:
                for choice_idx, log in session.logs():
                    self._tools.audit.note(self._tools.records.output(subject, choice_idx, log))

    async def Moderate(  # noqa: N802 - contract name
        self, request: pb.ModerateRequest, call: Call
    ) -> pb.ModerateResponse:
        """Score texts by category.

        Raises:
            InvalidRequest: too many texts, or too long ones.
        """
        num_chars = sum(map(len, request.texts))
        if len(request.texts) > _MAX_MODERATED_TEXTS or num_chars > self._limits.max_input_chars:
            raise InvalidRequest(
                f"At most {_MAX_MODERATED_TEXTS} texts with {self._limits.max_input_chars} "
                "characters are judged at once.",
                param="input",
            )
        started_s, deadline = self._clock.now_s(), self._deadline(call)
        moderator = self._tools.moderator
        found, turns = [], Turns()
        for text in request.texts:
            found.append(await moderator.scores(request.tenant_id, text, deadline))
            await turns.pass_on()
        elapsed_s = self._clock.now_s() - started_s
        records = self._tools.records
        self._tools.audit.note(records.moderation(request, found, moderator.version, elapsed_s))
        answer = pb.ModerateResponse(model_version=moderator.version)
        for scores in found:
            answer.results.add(
                scores=scores.by_category,
                flagged=sorted(scores.flagged),
                not_evaluated=scores.missed.value if scores.missed else "",
            )
        return answer

    async def ReportSent(  # noqa: N802 - contract name
        self, request: pb.SentReport, _call: Call
    ) -> pb.SentReportResponse:
        """Take down what the gateway sent."""
        self._tools.audit.note(self._tools.records.sent(request))
        return pb.SentReportResponse()

    async def ReportSentMany(  # noqa: N802 - contract name
        self, request: pb.SentReports, _call: Call
    ) -> pb.SentReportResponse:
        """Take down what the gateway sent for many requests."""
        for report in request.reports:
            self._tools.audit.note(self._tools.records.sent(report))
        return pb.SentReportResponse()

    def _subject(self, request: pb.CheckInputRequest | pb.OutputOpen, plan: Plan) -> Subject:
        models = self._tools.models
        version = models.version if models is not None and plan.asked is not None else ""
        return Subject(request.request_id, request.tenant_id, request.key_id, plan, version)

    def _prepare(
        self, request: pb.CheckInputRequest | pb.OutputOpen, direction: Direction
    ) -> _Prepared:
        planner, ref, tenant_id = self._tools.planner, request.policy, request.tenant_id
        plan = planner.plan(ref.policy, direction)
        if plan is None:
            return _Prepared(tenant_id, Plan(_NO_POLICY, direction, (), ()), Reason.UNKNOWN_POLICY)
        try:
            return _Prepared(tenant_id, planner.with_terms(plan, tuple(ref.blocklist)), None)
        except BlocklistTooLargeError:
            return _Prepared(tenant_id, plan, Reason.BAD_BLOCKLIST)

    async def _check_output(
        self, prepared: _Prepared, log: ChoiceLog, text: pb.OutputText, call: Call
    ) -> pb.CheckOutputResponse:
        started_s, check = self._clock.now_s(), log.check
        released = await self._judge_output(prepared, log, text, call)
        elapsed_s = self._clock.now_s() - started_s
        log.note(text.text, released, elapsed_s)
        verdict = check.verdict(released)
        self._metrics.held_chars.observe(check.num_held_chars)
        if verdict is None:
            self._metrics.duration_s.labels(Direction.OUTPUT.value).observe(elapsed_s)
        else:
            self._count(Direction.OUTPUT, verdict, prepared.plan.policy, elapsed_s)
        self._metrics.scanned_chars.labels(Direction.OUTPUT.value).inc(len(text.text))
        return pb.CheckOutputResponse(
            choice_idx=text.choice_idx,
            released=released.text,
            verdict=None if verdict is None else verdict_message(verdict, elapsed_s),
            last=check.is_over,
            scanned_chars=check.num_scanned_chars,
            released_chars=check.num_released_chars,
        )

    async def _judge_output(
        self, prepared: _Prepared, log: ChoiceLog, text: pb.OutputText, call: Call
    ) -> Released:
        check = log.check
        if prepared.missed is not None:
            return check.pass_unseen(text.text, text.last, prepared.missed)
        deadline = self._deadline(call)
        feed = partial(check.feed, text.text, text.last, deadline)
        if len(text.text) <= INLINE_CHARS:
            return feed()
        # What was made and paid for does not wait behind the same tenant's new requests.
        whose = (prepared.tenant_id, Direction.OUTPUT)
        try:
            return await self._tools.pool.run(whose, len(text.text), feed)
        except NoPlaceError:
            return check.pass_unseen(text.text, text.last, Reason.OVERLOADED)

    def _deadline(self, call: Call) -> Deadline:
        left_s = call.time_left_s()
        used_s = None if left_s is None else max(0.0, left_s * _USED_TIME_RATIO)
        return Deadline(self._clock, self._limits.check_budget_s, used_s)

    def _count(
        self, direction: Direction, verdict: Verdict, policy: Policy, elapsed_s: float
    ) -> None:
        metrics, label = self._metrics, direction.value
        metrics.verdicts.labels(label, verdict.state.value, verdict.action.name.lower()).inc()
        for finding in verdict.findings:
            metrics.findings.labels(label, finding.category, _done(finding)).inc()
        if verdict.state is State.NOT_EVALUATED and verdict.reason is not None:
            metrics.not_evaluated.labels(label, verdict.reason.name.lower()).inc()
            if policy.fails_open:
                metrics.fail_open.labels(label).inc()
        metrics.duration_s.labels(label).observe(elapsed_s)


def _done(finding: Finding) -> str:
    if finding.shadow_action is not None:
        return f"shadow_{finding.shadow_action.name.lower()}"
    return finding.action.name.lower()
