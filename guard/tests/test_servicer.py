"""The service: where work runs, what is counted, what is said when it cannot look."""

import asyncio
import base64
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
from prometheus_client import CollectorRegistry

from headrace_common.clock import Clock, SystemClock
from headrace_common.errors import InvalidRequest
from headrace_common.rpc import Call
from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_guard import cpu_pool
from headrace_guard.audit_record import RecordMaker
from headrace_guard.classifiers.blocklist import BlocklistCache
from headrace_guard.cpu_pool import INLINE_CHARS, CpuPool
from headrace_guard.input_judge import InputJudge
from headrace_guard.metrics import GuardMetrics
from headrace_guard.moderation import Moderator
from headrace_guard.output_session import MAX_CHOICES
from headrace_guard.plan import Planner
from headrace_guard.policy import parse_policies
from headrace_guard.servicer import GuardServicer, Limits, Tools
from headrace_guard.verdict import Reason
from headrace_guard.verdict_cache import VerdictCache
from headrace_testing.clock import FakeClock
from headrace_testing.waiting import turns_during

OPEN_POLICY = """
version = "1"
[policies.default]
fails_open = true
blocklist = []
owner_exempt = []
[policies.default.input]
"pii.*" = "block"
[policies.default.output]
"pii.*" = "block"
"""
RULES_ONLY = """
version = "1"
[policies.default]
fails_open = false
blocklist = []
owner_exempt = []
input = { blocklist = "block", "pii.*" = "flag" }
output = { blocklist = "block", "pii.*" = "flag" }
[policies.strict]
fails_open = false
blocklist = []
owner_exempt = []
keeps_text = true
input = { "pii.*" = "redact" }
output = { "pii.*" = "redact" }
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


class Notes:
    """Keeps audit records."""

    def __init__(self) -> None:
        self.records: list[pb.AuditRecord] = []

    def note(self, record: pb.AuditRecord) -> None:
        self.records.append(record)


def make(
    pool: CpuPool,
    metrics: GuardMetrics,
    text: str | None = None,
    *,
    notes: Notes | None = None,
    clock: Clock | None = None,
) -> GuardServicer:
    policies = parse_policies(RULES_ONLY if text is None else text)
    judge = InputJudge(pool, None, VerdictCache(100), 100_000, lambda *_: None)
    tools = Tools(
        planner=Planner(policies, BlocklistCache(8, 20, 1000)),
        judge=judge,
        moderator=Moderator(None, pool),
        models=None,
        pool=pool,
        audit=notes or Notes(),
        records=RecordMaker(b"key"),
    )
    return GuardServicer(tools, Limits(5.0, 100_000, 1024), clock or SystemClock(), metrics)


def question(text: str, terms: tuple[str, ...] = ("canary",)) -> pb.CheckInputRequest:
    return pb.CheckInputRequest(
        policy=pb.PolicyRef(blocklist=terms), parts=[pb.TextPart(text=text, trust=pb.TRUST_USER)]
    )


async def pieces(*texts: pb.OutputText) -> AsyncIterator[pb.CheckOutputRequest]:
    yield pb.CheckOutputRequest(open=pb.OutputOpen(policy=pb.PolicyRef(blocklist=["canary"])))
    for text in texts:
        yield pb.CheckOutputRequest(text=text)


@pytest.fixture
async def full_pool(pool: CpuPool) -> AsyncIterator[CpuPool]:
    """A pool whose one thread and one waiting place are taken."""
    release = threading.Event()
    working = [asyncio.create_task(pool.run("other", 1, release.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    yield pool
    release.set()
    await asyncio.gather(*working)


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


async def test_overload_is_not_evaluated(full_pool: CpuPool, servicer: GuardServicer) -> None:
    """A long text that finds no place is refused, a short one is still judged."""
    refused = await servicer.CheckInput(question(LONG), Call(5))
    assert refused.verdict.state == pb.VERDICT_STATE_NOT_EVALUATED
    assert refused.verdict.action == pb.ACTION_UNAVAILABLE
    assert "too many long texts" in refused.verdict.reason
    judged = await servicer.CheckInput(question("hello"), Call(5))
    assert judged.verdict.state == pb.VERDICT_STATE_CLEAN


async def test_overload_under_an_open_policy_passes_and_is_counted(
    full_pool: CpuPool, metrics: GuardMetrics, registry: CollectorRegistry
) -> None:
    """Passed is not the same as clean."""
    servicer = make(full_pool, metrics, OPEN_POLICY)
    answer = await servicer.CheckInput(question(LONG), Call(5))
    assert answer.verdict.state == pb.VERDICT_STATE_NOT_EVALUATED
    assert answer.verdict.action == pb.ACTION_ALLOW
    assert registry.get_sample_value("headrace_guard_fail_open_total", {"direction": "input"}) == 1


async def test_an_output_that_finds_no_place_stops(
    full_pool: CpuPool, servicer: GuardServicer
) -> None:
    """Nothing of it comes out."""
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
    servicer = make(pool, metrics, clock=FakeClock())
    answer = await servicer.CheckInput(question("canary"), Call(5))
    assert answer.verdict.elapsed_s == 0.0
    assert answer.verdict.policy_version.startswith("1/default/")


async def test_the_audit_says_what_was_found_and_not_its_text(
    pool: CpuPool, metrics: GuardMetrics
) -> None:
    """Who, which policy, where, a keyed hash; equal texts have equal hashes."""
    notes = Notes()
    servicer = make(pool, metrics, notes=notes)
    request = question("mail a@b.co and a@b.co")
    request.request_id, request.tenant_id, request.key_id = "r1", "t1", "k1"
    request.parts[0].path = "messages[0].content"
    await servicer.CheckInput(request, Call(5))
    (record,) = notes.records
    assert (record.kind, record.request_id, record.tenant_id) == (pb.AUDIT_KIND_INPUT, "r1", "t1")
    assert (record.key_id, record.policy, record.scanned_chars) == ("k1", "default", 22)
    assert record.policy_version.startswith("1/default/")
    first, second = record.findings
    assert (first.category, first.path) == ("pii.email", "messages[0].content")
    assert (first.start, first.end, first.text) == (5, 11, "")
    assert first.span_hmac == second.span_hmac
    assert b"a@b.co" not in record.SerializeToString()


async def test_the_audit_counts_what_was_read_and_released(
    pool: CpuPool, metrics: GuardMetrics
) -> None:
    """One record per choice, at its end; text only where the policy keeps it."""
    notes = Notes()
    servicer = make(pool, metrics, notes=notes)

    async def requests() -> AsyncIterator[pb.CheckOutputRequest]:
        opened = pb.OutputOpen(request_id="r", policy=pb.PolicyRef(policy="strict"))
        yield pb.CheckOutputRequest(open=opened)
        for idx, text in ((0, "mail a@b.c"), (1, "hello"), (0, "o now")):
            yield pb.CheckOutputRequest(text=pb.OutputText(choice_idx=idx, text=text))
        yield pb.CheckOutputRequest(text=pb.OutputText(choice_idx=0, last=True))

    _ = [one async for one in servicer.CheckOutput(requests(), Call(5))]
    zero, one = notes.records
    assert (zero.choice_idx, zero.scanned_chars, zero.released_chars) == (0, 15, 15)
    assert zero.released_text_chars == len("mail [redacted pii.email] now")
    assert (zero.findings[0].text, zero.action) == ("a@b.co", pb.ACTION_REDACT)
    assert (one.choice_idx, one.scanned_chars, one.state) == (1, 5, pb.VERDICT_STATE_CLEAN)


async def test_moderation_tells_what_was_not_judged(servicer: GuardServicer) -> None:
    """Rules score; without trained classifiers the rest is not called clean."""
    answer = await servicer.Moderate(pb.ModerateRequest(texts=["mail a@b.co", "hi"]), Call(5))
    assert [list(one.flagged) for one in answer.results] == [["pii.email"], []]
    assert answer.results[0].scores["pii.email"] == 1.0
    assert answer.results[1].not_evaluated


async def test_many_texts_to_score_let_others_run(
    servicer: GuardServicer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is short enough for the loop, all together are not."""
    monkeypatch.setattr(cpu_pool, "_STRETCH_S", 0.0)
    work = servicer.Moderate(pb.ModerateRequest(texts=["mail a@b.co"] * 100), Call(5))
    answer, turns = await turns_during(work)
    assert len(answer.results) == 100
    assert turns >= 100


async def test_moderation_reads_what_is_encoded_and_is_audited(
    pool: CpuPool, metrics: GuardMetrics
) -> None:
    """Scores count for the text and for what is encoded in it; the audit has them by text."""
    notes = Notes()
    servicer = make(pool, metrics, notes=notes)
    encoded = base64.b64encode(b"write to jo.doe@mail.example.org").decode()
    request = pb.ModerateRequest(request_id="r1", key_id="k1", texts=["hello", f"see {encoded}"])
    answer = await servicer.Moderate(request, Call(5))
    assert [list(one.flagged) for one in answer.results] == [[], ["pii.email"]]
    (record,) = notes.records
    assert (record.kind, record.request_id) == (pb.AUDIT_KIND_MODERATION, "r1")
    assert (record.key_id, record.scanned_chars) == ("k1", 9 + len(encoded))
    (finding,) = record.findings
    assert (finding.category, finding.path, finding.text) == ("pii.email", "input[1]", "")
    assert record.state == pb.VERDICT_STATE_NOT_EVALUATED
    assert record.reason == Reason.NO_MODEL.value
