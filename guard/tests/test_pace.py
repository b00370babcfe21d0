"""Texts that cannot be judged in the time that their wait has left are not begun."""

import asyncio
import time
from dataclasses import replace
from typing import cast

import pytest
from prometheus_client import Gauge

from headrace_common.clock import SystemClock
from headrace_guard.classifiers.base import Classifier, Match
from headrace_guard.classifiers.text_model import Asked, Judged, TextModels, Trust
from headrace_guard.cpu_pool import INLINE_CHARS, CpuPool
from headrace_guard.deadline import Deadline, OutOfTimeError
from headrace_guard.input_check import Part
from headrace_guard.input_judge import InputJudge, Question
from headrace_guard.normalise import Window
from headrace_guard.pace import Pace
from headrace_guard.policy import Direction
from headrace_guard.verdict import State
from headrace_guard.verdict_cache import VerdictCache
from headrace_testing.clock import FakeClock
from headrace_testing.guard_plans import plan


def test_what_cannot_end_in_time_is_not_begun() -> None:
    """By what texts of its length took; before anything is known each is begun."""
    clock, pace = FakeClock(), Pace()
    deadline = Deadline(clock, 3.0)
    clock.advance(2.9)
    pace.check(100_000, deadline)
    for _ in range(50):
        pace.note(100_000, 0.5)
    pace.check(10_000, deadline)
    with pytest.raises(OutOfTimeError):
        pace.check(100_000, deadline)


def test_one_slow_moment_refuses_nobody_for_ever() -> None:
    """With half of its time left a text is begun, whatever others took."""
    clock, pace = FakeClock(), Pace()
    pace.note(1000, 3600.0)
    deadline = Deadline(clock, 3.0)
    clock.advance(1.4)
    pace.check(1_000_000, deadline)
    clock.advance(0.2)
    with pytest.raises(OutOfTimeError):
        pace.check(1_000_000, deadline)


class _Slow:
    """Rules and models that take a hundredth of a second each, on the pool's one thread."""

    version = "slow"

    def __init__(self, pool: CpuPool) -> None:
        self._pool = pool
        self.num_begun = 0

    def find(self, _window: Window) -> list[Match]:
        self.num_begun += 1
        time.sleep(0.01)
        return []

    async def judge(
        self, tenant_id: str, window: Window, _trust: Trust, _asked: Asked, _deadline: Deadline
    ) -> Judged:
        length = len(window.text)
        await self._pool.run(tenant_id, length, lambda: time.sleep(0.01), goes_on=True)
        return Judged()


async def test_a_flood_is_judged_as_far_as_there_is_time() -> None:
    """Of texts that come together, those that are begun are ended: none takes another's time."""
    pool = CpuPool(1, 64, Gauge("waiting", "Unused.", registry=None))
    slow = _Slow(pool)
    made = plan(input_='"toxicity" = "flag"', direction=Direction.INPUT, asks_models=True)
    made = replace(made, holding=(), watching=(cast("Classifier", slow),))
    models = cast("TextModels", slow)
    judge = InputJudge(pool, models, VerdictCache(0), 10**6, lambda *_: None)

    async def ask(idx: int) -> bool:
        part = Part(f"{idx} " + "word " * INLINE_CHARS, Trust.USER)
        question = Question(made, "flood", [part])
        result = await judge.judge(question, Deadline(SystemClock(), 0.4))
        return result.verdict.state is State.CLEAN

    judged = sum(await asyncio.gather(*(ask(idx) for idx in range(60))))
    pool.close()
    assert judged >= 5
    assert slow.num_begun - judged <= 2
