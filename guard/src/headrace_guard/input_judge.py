"""Judges a request: what is cached, what runs here or on a thread, and when models are asked.

::

    parts --cache?--> rules and blocklists (this loop, or a thread if long)
                          '--> borders between parts (this loop, a stretch at a time)
                                  '--> trained models, part by part, decoded texts too --> cache
                                          '--> verdict
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from headrace_common.fair_places import NoPlaceError
from headrace_guard.classifiers.text_model import TextModels
from headrace_guard.cpu_pool import INLINE_CHARS, CpuPool, Turns
from headrace_guard.deadline import Deadline, OutOfTimeError
from headrace_guard.decode import placed
from headrace_guard.input_check import (
    InputResult,
    Part,
    PartResult,
    allowed,
    check_borders,
    check_part,
    combine,
)
from headrace_guard.normalise import Window
from headrace_guard.pace import Pace
from headrace_guard.plan import Plan
from headrace_guard.verdict import Action, Finding, Reason, judge
from headrace_guard.verdict_cache import VerdictCache


@dataclass(frozen=True)
class Question:
    """One request to judge.

    Args:
        plan: what to look for.
        tenant_id: whose it is; verdicts are cached per tenant, threads are shared by tenants.
        parts: all its texts.
        missed: why something of it cannot be judged, as far as is known already.
    """

    plan: Plan
    tenant_id: str
    parts: Sequence[Part]
    missed: Reason | None = None


class InputJudge:
    """Judges requests. Belongs to one event loop.

    Args:
        pool: threads for long texts.
        models: trained classifiers; None = none are there.
        cache: results of texts that were judged before.
        max_chars: most characters of all parts of a request together.
        on_cached: told how many parts were found in the cache, and how many not.
    """

    def __init__(
        self,
        pool: CpuPool,
        models: TextModels | None,
        cache: VerdictCache,
        max_chars: int,
        on_cached: Callable[[int, int], None],
    ) -> None:
        self._pool, self._models, self._cache = pool, models, cache
        self._max_chars, self._on_cached = max_chars, on_cached
        self._pace = Pace()

    async def judge(self, question: Question, deadline: Deadline) -> InputResult:
        """Judge one request; what could not be judged in time is told in the verdict."""
        plan = question.plan
        if not plan.looks:
            return combine(plan, question.parts, (), question.missed)
        if sum(len(part.text) for part in question.parts) > self._max_chars:
            return _unseen(plan, Reason.TOO_LONG)
        try:
            async with asyncio.timeout(deadline.budget_s):
                return await self._judge(question, deadline)
        except NoPlaceError:
            return _unseen(plan, Reason.OVERLOADED)
        except (TimeoutError, OutOfTimeError):
            return _unseen(plan, Reason.OUT_OF_TIME)

    async def _judge(self, question: Question, deadline: Deadline) -> InputResult:
        plan, parts = question.plan, question.parts
        version = self._models.version if self._models is not None else ""
        scope = self._cache.scope(question.tenant_id, plan, version)
        keys = [self._cache.key(scope, part) for part in parts]
        results = {key: found for key in keys if (found := self._cache.get(key)) is not None}
        fresh = {key: part for key, part in zip(keys, parts, strict=True) if key not in results}
        self._on_cached(len(parts) - len(fresh), len(fresh))
        turns = Turns()
        num_chars = sum(len(part.text) for part in fresh.values())
        judged, begun_left_s = await self._check_parts(question, fresh, num_chars, deadline)
        border_findings, missed = await _check_borders(plan, parts, deadline, turns)
        for key, part in fresh.items():
            results[key] = judged[key]
            if not self._is_blocked(plan, judged[key]):
                results[key] = await self._ask_models(question, part, judged[key], deadline)
                self._cache.put(key, part, results[key])
                await turns.pass_on()
        if num_chars > INLINE_CHARS:
            self._pace.note(num_chars, begun_left_s - deadline.left_s())
        findings = [
            plan.finding(match, idx)
            for idx, key in enumerate(keys)
            for match in results[key].matches
        ]
        missed = question.missed or missed
        for key in keys:
            missed = missed or results[key].missed
        return combine(plan, parts, findings + border_findings, missed)

    async def _check_parts(
        self, question: Question, fresh: dict[bytes, Part], num_chars: int, deadline: Deadline
    ) -> tuple[dict[bytes, PartResult], float]:
        """Look with rules and blocklists; return also the time that was left as it began."""
        plan, run = question.plan, partial(self._pool.run_long, question.tenant_id)

        def look_at_all() -> tuple[dict[bytes, PartResult], float]:
            self._pace.check(num_chars, deadline)
            left_s = deadline.left_s()
            return {key: check_part(plan, it, deadline) for key, it in fresh.items()}, left_s

        if num_chars > INLINE_CHARS:
            return await run(num_chars, look_at_all)
        return {
            key: await run(len(part.text), partial(check_part, plan, part, deadline))
            for key, part in fresh.items()
        }, 0.0

    def _is_blocked(self, plan: Plan, result: PartResult) -> bool:
        return any(
            plan.policy.action(plan.direction, match.category) is Action.BLOCK
            for match in result.matches
        )

    async def _ask_models(
        self, question: Question, part: Part, result: PartResult, deadline: Deadline
    ) -> PartResult:
        plan, models = question.plan, self._models
        if plan.asked is None or not part.text.strip():
            return result
        if models is None:
            return replace(result, missed=result.missed or Reason.NO_MODEL)
        ask = partial(models.judge, question.tenant_id)
        judged = await ask(Window(part.text), part.trust, plan.asked, deadline)
        matches, missed = list(judged.matches), judged.missed
        for piece in result.pieces:
            inner = await ask(Window(piece.text), part.trust, plan.asked, deadline)
            matches += (placed(match, piece) for match in inner.matches)
            missed = missed or inner.missed
        found = (*result.matches, *allowed(plan, part, matches))
        return PartResult(found, result.missed or missed, result.pieces)


async def _check_borders(
    plan: Plan, parts: Sequence[Part], deadline: Deadline, turns: Turns
) -> tuple[list[Finding], Reason | None]:
    """Many short parts have much text around their borders, of which each step takes some."""
    findings: list[Finding] = []
    try:
        for found in check_borders(plan, parts, deadline):
            findings += found
            await turns.pass_on()
    except OutOfTimeError:
        return [], Reason.OUT_OF_TIME
    return findings, None


def _unseen(plan: Plan, reason: Reason) -> InputResult:
    policy = plan.policy
    verdict = judge((), policy.version, not_evaluated=reason, fails_open=policy.fails_open)
    return InputResult(verdict, {})
