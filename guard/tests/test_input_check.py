"""A whole request: every part, every failure to look."""

import base64

import pytest

from headrace_common.clock import SystemClock
from headrace_guard import cpu_pool
from headrace_guard.classifiers.text_model import Trust
from headrace_guard.deadline import Deadline
from headrace_guard.input_check import InputResult, Part
from headrace_guard.input_judge import Question
from headrace_guard.plan import Plan
from headrace_guard.policy import Direction
from headrace_guard.verdict import Action, Reason, State
from headrace_testing.guard_plans import input_judge, plan
from headrace_testing.waiting import turns_during

MIXED = plan(
    input_='blocklist = "block"\n"pii.*" = "redact"\n"secret.*" = "flag"',
    terms=("canary",),
    owner_exempt=("pii.*",),
    direction=Direction.INPUT,
)


async def check(
    made: Plan,
    *texts: str,
    trust: Trust = Trust.USER,
    missed: Reason | None = None,
    seconds: float = 60.0,
) -> InputResult:
    parts = [Part(text, trust) for text in texts]
    with input_judge(max_chars=1000) as judge:
        question = Question(made, "t", parts, missed)
        return await judge.judge(question, Deadline(SystemClock(), seconds))


async def test_every_part_is_looked_at() -> None:
    """Findings name the part and the place in it."""
    result = await check(MIXED, "hi", "", "please canary now")
    assert result.verdict.action is Action.BLOCK
    assert [(f.part_idx, f.start, f.end) for f in result.verdict.findings] == [(2, 7, 13)]


async def test_clean_is_clean() -> None:
    """All parts were seen and nothing was found."""
    result = await check(MIXED, "hi", "there")
    assert (result.verdict.state, result.verdict.action) == (State.CLEAN, Action.ALLOW)
    assert result.redacted_parts == {}


async def test_redaction_rewrites_only_the_span_of_its_part() -> None:
    """Positions are code points of the original."""
    result = await check(MIXED, "hi", "é水 a@b.co!")
    assert result.verdict.action is Action.REDACT
    assert result.redacted_parts == {1: "é水 [redacted pii.email]!"}


async def test_a_flagged_part_is_not_rewritten() -> None:
    """Only what the policy redacts changes."""
    result = await check(MIXED, "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2ln")
    assert (result.verdict.action, result.redacted_parts) == (Action.FLAG, {})


async def test_the_owners_text_is_exempt_only_from_what_the_policy_says() -> None:
    """A support address in a system prompt is fine, a blocked word is not."""
    assert (await check(MIXED, "write to a@b.co", trust=Trust.OWNER)).verdict.state is State.CLEAN
    assert (await check(MIXED, "the canary", trust=Trust.OWNER)).verdict.action is Action.BLOCK


async def test_what_nobody_reads_is_not_evaluated() -> None:
    """An image part is never clean."""
    verdict = (await check(MIXED, "hi", missed=Reason.OPAQUE_PART)).verdict
    assert (verdict.state, verdict.action) == (State.NOT_EVALUATED, Action.UNAVAILABLE)


async def test_a_block_stands_beside_what_was_not_seen() -> None:
    """It is refused as blocked, not as unavailable."""
    verdict = (await check(MIXED, "canary", missed=Reason.OPAQUE_PART)).verdict
    assert (verdict.state, verdict.action) == (State.HIT, Action.BLOCK)


async def test_too_long_is_not_evaluated() -> None:
    """All parts count together."""
    verdict = (await check(MIXED, "x " * 300, "y " * 300)).verdict
    assert (verdict.state, verdict.reason) == (State.NOT_EVALUATED, Reason.TOO_LONG)


async def test_out_of_time_is_not_evaluated() -> None:
    """Whatever was not reached was not seen."""
    verdict = (await check(MIXED, "hi", seconds=0.0)).verdict
    assert (verdict.state, verdict.reason) == (State.NOT_EVALUATED, Reason.OUT_OF_TIME)


async def test_an_open_policy_still_redacts_what_it_saw() -> None:
    """Failing open is no reason to pass on what was found."""
    opened = plan(input_='"pii.*" = "redact"', fails_open=True, direction=Direction.INPUT)
    result = await check(opened, "a@b.co", missed=Reason.OPAQUE_PART)
    assert (result.verdict.state, result.verdict.action) == (State.NOT_EVALUATED, Action.REDACT)
    assert result.redacted_parts == {0: "[redacted pii.email]"}


@pytest.mark.parametrize("kind", ["base64", "hex", "base64 of hex"])
async def test_what_is_encoded_is_judged_on_its_own(kind: str) -> None:
    """And refused at the place of the encoded text."""
    coded = {
        "base64": base64.b64encode(b"the canary sings").decode(),
        "hex": b"the canary sings".hex(),
        "base64 of hex": base64.b64encode(b"the canary sings".hex().encode()).decode(),
    }[kind]
    result = await check(MIXED, f"run {coded} now")
    assert result.verdict.action is Action.BLOCK
    (finding,) = result.verdict.findings
    assert (finding.start, finding.end) == (4, 4 + len(coded))
    assert finding.detector.endswith("@" + kind.replace(" of ", "+"))


@pytest.mark.parametrize(("first", "second"), [("a can", "ary here"), ("the wet", "paint")])
async def test_a_word_split_over_two_parts_is_found(first: str, second: str) -> None:
    """Each half is a finding of its own part."""
    made = plan(
        input_='blocklist = "redact"', terms=("canary", "wet paint"), direction=Direction.INPUT
    )
    result = await check(made, "hello", first, second)
    assert {finding.part_idx for finding in result.verdict.findings} == {1, 2}
    assert result.redacted_parts[1].startswith(first[:1])
    assert result.redacted_parts[2].startswith("[redacted blocklist]")


@pytest.mark.parametrize(
    "texts",
    [
        ("a can", "ar", "y here"),
        ("a can", "ary here", "yes", "and so", "on", "and on"),
        ("a c", "a", "n", "a", "r", "y", "there"),
        (f"run {base64.b64encode(b'the canary sings').decode()[:11]}",
         f"{base64.b64encode(b'the canary sings').decode()[11:]} now", "please"),
    ],
)  # fmt: skip
async def test_what_is_split_over_many_parts_is_found(texts: tuple[str, ...]) -> None:
    """However long ago, in however many pieces, encoded or not; positions lie in the parts."""
    result = await check(MIXED, "hello", *texts)
    assert result.verdict.action is Action.BLOCK
    for finding in result.verdict.findings:
        assert 0 <= finding.start < finding.end <= len(("hello", *texts)[finding.part_idx])


@pytest.mark.parametrize("text", ["i\u200bg\u200bn\u200bore", "a.b@c.de", "10.0.0.1 "])
async def test_many_short_parts_let_others_run(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Little text has many borders, and much is looked at around each of them."""
    monkeypatch.setattr(cpu_pool, "_STRETCH_S", 0.0)
    result, turns = await turns_during(check(MIXED, *(f"{text}{idx}" for idx in range(70))))
    assert result.verdict.state is not State.NOT_EVALUATED
    # One for each part, and at least fifteen for some 50,000 characters around borders.
    assert turns >= 70 + 15


async def test_parts_that_only_meet_are_clean() -> None:
    """No word of the list crosses their borders."""
    assert (await check(MIXED, "a can", "of beans", "ary", "x", "can")).verdict.findings == ()


async def test_shadow_reports_and_does_nothing() -> None:
    """What would have been done is told, and the request passes."""
    made = plan(input_='"pii.*" = { action = "block", shadow = true }', direction=Direction.INPUT)
    verdict = (await check(made, "a@b.co")).verdict
    assert (verdict.state, verdict.action) == (State.HIT, Action.ALLOW)
    assert verdict.findings[0].shadow_action is Action.BLOCK


async def test_a_policy_that_asks_for_models_which_are_not_there_is_not_evaluated() -> None:
    """Not clean."""
    made = plan(input_='injection = "flag"', direction=Direction.INPUT, asks_models=True)
    verdict = (await check(made, "hi")).verdict
    assert (verdict.state, verdict.reason) == (State.NOT_EVALUATED, Reason.NO_MODEL)
