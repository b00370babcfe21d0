"""The Guard service: picks what looks, where it runs, and what is said when it cannot look."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TypeVar

from headrace_common.clock import Clock
from headrace_common.errors import InvalidRequest
from headrace_common.rpc import Call
from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_guard.classifiers.blocklist import BlocklistTooLargeError
from headrace_guard.cpu_pool import CpuPool, OverloadedError
from headrace_guard.deadline import Deadline
from headrace_guard.input_check import InputResult, Part, check_input
from headrace_guard.metrics import GuardMetrics
from headrace_guard.output_check import OutputCheck, Released
from headrace_guard.plan import Plan, Planner
from headrace_guard.policy import Direction, Policy
from headrace_guard.verdict import Reason, State, Verdict, judge
from headrace_guard.wire import verdict_message

T = TypeVar("T")

# Longer texts go to a thread: this much takes about a millisecond.
INLINE_CHARS = 4096
# As many as the public API allows for `n`.
MAX_CHOICES = 128
# Share of the caller's remaining time that is used, so that the answer still arrives.
_USED_TIME_RATIO = 0.8
# What a key gets whose policy does not exist: nothing passes.
_NO_POLICY = Policy(
    "", "unknown", False, (), frozenset(), {direction: {} for direction in Direction}
)


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
class _Prepared:
    """What looks, or why nothing can."""

    plan: Plan
    missed: Reason | None


class GuardServicer:
    """Guard contract. Short texts are judged on the event loop, long ones on threads.

    Args:
        planner: policies, ready to run.
        pool: threads for long texts.
        limits: bounds of one check.
        clock: source of time.
        metrics: where verdicts are counted.
    """

    def __init__(
        self, planner: Planner, pool: CpuPool, limits: Limits, clock: Clock, metrics: GuardMetrics
    ) -> None:
        self._planner, self._pool, self._limits = planner, pool, limits
        self._clock, self._metrics = clock, metrics

    async def CheckInput(  # noqa: N802 - contract name
        self, request: pb.CheckInputRequest, call: Call
    ) -> pb.CheckInputResponse:
        """Judge a whole request."""
        started_s = self._clock.now_s()
        prepared = self._prepare(request.policy, Direction.INPUT)
        result = await self._check_input(prepared, request, self._deadline(call))
        elapsed_s = self._clock.now_s() - started_s
        self._count(Direction.INPUT, result.verdict, prepared.plan.policy, elapsed_s)
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
        choices: dict[int, OutputCheck] = {}
        ended: set[int] = set()
        async for request in requests:
            match request.WhichOneof("kind"):
                case "open" if prepared is None:
                    prepared = self._prepare(request.open.policy, Direction.OUTPUT)
                case "text" if prepared is not None:
                    check = self._choice(choices, prepared.plan, request.text, ended)
                    yield await self._check_output(prepared, check, request.text, call)
                case kind:
                    raise InvalidRequest(f"CheckOutput: {kind or 'an empty message'} out of turn")

    def _prepare(self, ref: pb.PolicyRef, direction: Direction) -> _Prepared:
        plan = self._planner.plan(ref.policy, direction)
        if plan is None:
            return _Prepared(Plan(_NO_POLICY, direction, (), ()), Reason.UNKNOWN_POLICY)
        try:
            return _Prepared(self._planner.with_terms(plan, tuple(ref.blocklist)), None)
        except BlocklistTooLargeError:
            return _Prepared(plan, Reason.BAD_BLOCKLIST)

    async def _check_input(
        self, prepared: _Prepared, request: pb.CheckInputRequest, deadline: Deadline
    ) -> InputResult:
        plan, missed = prepared.plan, prepared.missed
        # A policy that looks for nothing has nothing left unseen.
        if missed is None and request.opaque_paths and plan.all_classifiers:
            missed = Reason.OPAQUE_PART
        parts = [Part(part.text, part.trust == pb.TRUST_OWNER) for part in request.parts]

        def work() -> InputResult:
            return check_input(plan, parts, missed, self._limits.max_input_chars, deadline)

        try:
            async with asyncio.timeout(deadline.budget_s):
                return await self._run(sum(len(part.text) for part in parts), work)
        except OverloadedError:
            return _unseen(plan, Reason.OVERLOADED)
        except TimeoutError:
            return _unseen(plan, Reason.OUT_OF_TIME)

    def _choice(
        self, choices: dict[int, OutputCheck], plan: Plan, text: pb.OutputText, ended: set[int]
    ) -> OutputCheck:
        if text.choice_idx in ended:
            raise InvalidRequest(f"CheckOutput: choice {text.choice_idx} has ended")
        if text.last:
            ended.add(text.choice_idx)
        if text.choice_idx not in choices:
            if len(choices) >= MAX_CHOICES:
                raise InvalidRequest(f"CheckOutput: more than {MAX_CHOICES} choices")
            check = OutputCheck(plan, text.choice_idx, self._limits.max_held_chars)
            choices[text.choice_idx] = check
        return choices[text.choice_idx]

    async def _check_output(
        self, prepared: _Prepared, check: OutputCheck, text: pb.OutputText, call: Call
    ) -> pb.CheckOutputResponse:
        started_s = self._clock.now_s()
        released = await self._judge_output(prepared, check, text, call)
        elapsed_s = self._clock.now_s() - started_s
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
        self, prepared: _Prepared, check: OutputCheck, text: pb.OutputText, call: Call
    ) -> Released:
        if prepared.missed is not None:
            return check.pass_unseen(text.text, text.last, prepared.missed)
        deadline = self._deadline(call)
        try:
            return await self._run(
                len(text.text), lambda: check.feed(text.text, text.last, deadline)
            )
        except OverloadedError:
            return check.pass_unseen(text.text, text.last, Reason.OVERLOADED)

    async def _run(self, num_chars: int, work: Callable[[], T]) -> T:
        return work() if num_chars <= INLINE_CHARS else await self._pool.run(work)

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
            metrics.findings.labels(label, finding.category, finding.action.name.lower()).inc()
        if verdict.state is State.NOT_EVALUATED and verdict.reason is not None:
            metrics.not_evaluated.labels(label, verdict.reason.name.lower()).inc()
            if policy.fails_open:
                metrics.fail_open.labels(label).inc()
        metrics.duration_s.labels(label).observe(elapsed_s)


def _unseen(plan: Plan, reason: Reason) -> InputResult:
    policy = plan.policy
    verdict = judge((), policy.version, not_evaluated=reason, fails_open=policy.fails_open)
    return InputResult(verdict, {})
