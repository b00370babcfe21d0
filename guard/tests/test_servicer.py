"""The service: where work runs, what is counted, what is said when it cannot look."""

from collections.abc import AsyncIterator, Iterator

import pytest
from prometheus_client import CollectorRegistry

from headrace_common.clock import SystemClock
from headrace_common.errors import InvalidRequest
from headrace_common.rpc import Call
from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_guard.classifiers.blocklist import BlocklistCache
from headrace_guard.cpu_pool import CpuPool
from headrace_guard.metrics import GuardMetrics
from headrace_guard.plan import Planner
from headrace_guard.policy import load_policies, parse_policies
from headrace_guard.servicer import INLINE_CHARS, MAX_CHOICES, GuardServicer, Limits
from headrace_testing.clock import FakeClock

OPEN_POLICY = """
version = "1"
[policies.default]
fails_open = true
blocklist = []
owner_exempt = []
[policies.default.input]
"*" = "block"
[policies.default.output]
"*" = "block"
"""
LONG = "word " * INLINE_CHARS


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> GuardMetrics:
    return GuardMetrics(registry)


@pytest.fixture
def pool(metrics: GuardMetrics) -> Iterator[CpuPool]:
    made = CpuPool(1, 1, metrics.long_texts_waiting)
    yield made
    made.close()


@pytest.fixture
def servicer(pool: CpuPool, metrics: GuardMetrics) -> GuardServicer:
    return make(pool, metrics)


def make(pool: CpuPool, metrics: GuardMetrics, text: str | None = None) -> GuardServicer:
    policies = load_policies(None) if text is None else parse_policies(text)
    planner = Planner(policies, BlocklistCache(8, 20, 1000))
    return GuardServicer(planner, pool, Limits(5.0, 100_000, 1024), SystemClock(), metrics)


def question(text: str, terms: tuple[str, ...] = ("canary",)) -> pb.CheckInputRequest:
    return pb.CheckInputRequest(
        policy=pb.PolicyRef(blocklist=terms), parts=[pb.TextPart(text=text, trust=pb.TRUST_USER)]
    )


async def pieces(*texts: pb.OutputText) -> AsyncIterator[pb.CheckOutputRequest]:
    yield pb.CheckOutputRequest(open=pb.OutputOpen(policy=pb.PolicyRef(blocklist=["canary"])))
    for text in texts:
        yield pb.CheckOutputRequest(text=text)


def fill(pool: CpuPool) -> None:
    """Take all places of a pool with one thread and one waiting place."""
    pool._change(2)


async def test_long_texts_are_judged_too(servicer: GuardServicer) -> None:
    """On a thread, with the same result."""
    answer = await servicer.CheckInput(question(LONG + " canary"), Call(5))
    assert answer.verdict.action == pb.ACTION_BLOCK
    assert answer.verdict.findings[0].start == len(LONG) + 1


async def test_redacted_parts_come_by_their_index(servicer: GuardServicer) -> None:
    """Only the parts that changed."""
    request = question("hi")
    request.policy.policy = "strict"
    request.parts.add(text="mail a@b.co now", trust=pb.TRUST_USER)
    answer = await servicer.CheckInput(request, Call(5))
    assert answer.verdict.action == pb.ACTION_REDACT
    assert dict(answer.redacted_parts) == {1: "mail [redacted pii.email] now"}


async def test_overload_is_not_evaluated(pool: CpuPool, servicer: GuardServicer) -> None:
    """A long text that finds no place is refused, a short one is still judged."""
    fill(pool)
    refused = await servicer.CheckInput(question(LONG), Call(5))
    assert refused.verdict.state == pb.VERDICT_STATE_NOT_EVALUATED
    assert refused.verdict.action == pb.ACTION_UNAVAILABLE
    assert "too much to do" in refused.verdict.reason
    judged = await servicer.CheckInput(question("hello"), Call(5))
    assert judged.verdict.state == pb.VERDICT_STATE_CLEAN


async def test_overload_under_an_open_policy_passes_and_is_counted(
    pool: CpuPool, metrics: GuardMetrics, registry: CollectorRegistry
) -> None:
    """Passed is not the same as clean."""
    fill(pool)
    servicer = make(pool, metrics, OPEN_POLICY)
    answer = await servicer.CheckInput(question(LONG), Call(5))
    assert answer.verdict.state == pb.VERDICT_STATE_NOT_EVALUATED
    assert answer.verdict.action == pb.ACTION_ALLOW
    assert registry.get_sample_value("headrace_guard_fail_open_total", {"direction": "input"}) == 1


async def test_an_output_that_finds_no_place_stops(pool: CpuPool, servicer: GuardServicer) -> None:
    """Nothing of it comes out."""
    fill(pool)
    stream = servicer.CheckOutput(pieces(pb.OutputText(text=LONG)), Call(5))
    (answer,) = [one async for one in stream]
    assert answer.verdict.action == pb.ACTION_UNAVAILABLE
    assert (answer.released, answer.last, answer.released_chars) == ("", True, 0)


async def test_long_output_comes_back_whole(servicer: GuardServicer) -> None:
    """One message may be a whole answer."""
    stream = servicer.CheckOutput(pieces(pb.OutputText(text=LONG, last=True)), Call(5))
    (answer,) = [one async for one in stream]
    assert (answer.released, answer.last) == (LONG, True)


async def test_a_caller_without_time_gets_not_evaluated(servicer: GuardServicer) -> None:
    """Not an answer that looks clean."""
    for text in ("hello", LONG):
        answer = await servicer.CheckInput(question(text), Call(0.0))
        assert answer.verdict.action == pb.ACTION_UNAVAILABLE
        assert answer.verdict.state == pb.VERDICT_STATE_NOT_EVALUATED


async def test_a_blocklist_that_is_too_large_is_not_evaluated(servicer: GuardServicer) -> None:
    """Judging without it would be a hole."""
    terms = tuple(f"term{idx}" for idx in range(21))
    answer = await servicer.CheckInput(question("hello", terms), Call(5))
    assert answer.verdict.action == pb.ACTION_UNAVAILABLE
    assert "blocklist" in answer.verdict.reason


async def test_too_many_choices_are_refused(servicer: GuardServicer) -> None:
    """A stream cannot fill the memory with choices."""
    texts = [pb.OutputText(choice_idx=idx, text="x") for idx in range(MAX_CHOICES + 1)]
    with pytest.raises(InvalidRequest):
        _ = [one async for one in servicer.CheckOutput(pieces(*texts), Call(5))]


async def test_verdicts_and_findings_are_counted(
    servicer: GuardServicer, registry: CollectorRegistry
) -> None:
    """By direction, state, action and category; clean output pieces by their time only."""
    await servicer.CheckInput(question("mail a@b.co"), Call(5))
    texts = [pb.OutputText(text="hello "), pb.OutputText(text="canary", last=True)]
    _ = [one async for one in servicer.CheckOutput(pieces(*texts), Call(5))]
    value = registry.get_sample_value
    labels = {"direction": "input", "category": "pii.email", "action": "flag"}
    assert value("headrace_guard_findings_total", labels) == 1
    labels = {"direction": "output", "state": "hit", "action": "block"}
    assert value("headrace_guard_verdicts_total", labels) == 1
    count = "headrace_guard_check_duration_seconds_count"
    assert value(count, {"direction": "output"}) == 2
    assert value("headrace_guard_held_chars_count") == 2


async def test_elapsed_time_is_told(pool: CpuPool, metrics: GuardMetrics) -> None:
    """From the clock that was given."""
    clock = FakeClock()
    planner = Planner(load_policies(None), BlocklistCache(8, 20, 1000))
    servicer = GuardServicer(planner, pool, Limits(5.0, 1000, 1024), clock, metrics)
    answer = await servicer.CheckInput(question("canary"), Call(5))
    assert answer.verdict.elapsed_s == 0.0
    assert answer.verdict.policy_version.startswith("1/default/")
