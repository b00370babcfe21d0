"""What any guard does, the real one and the fake: the suite that keeps the fake honest."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from headrace_common.errors import InvalidRequest
from headrace_common.rpc import call_unary, method_ref, open_channel
from headrace_common.session import SessionClient
from headrace_common.session_call import SessionCall
from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_guard.server import GuardApp
from headrace_guard.settings import GuardSettings
from headrace_testing.fake_guard import FakeGuard, FakeGuardServer

SERVICE = pb.DESCRIPTOR.services_by_name["Guard"]
CHECK_INPUT = method_ref(SERVICE, "CheckInput", pb.CheckInputRequest, pb.CheckInputResponse)
CHECK_OUTPUT = method_ref(SERVICE, "CheckOutput", pb.CheckOutputRequest, pb.CheckOutputResponse)
MODERATE = method_ref(SERVICE, "Moderate", pb.ModerateRequest, pb.ModerateResponse)
REPORT_SENT = method_ref(SERVICE, "ReportSent", pb.SentReport, pb.SentReportResponse)
REPORT_MANY = method_ref(SERVICE, "ReportSentMany", pb.SentReports, pb.SentReportResponse)
OutputCall = SessionCall[pb.CheckOutputRequest, pb.CheckOutputResponse]
CANARY = pb.PolicyRef(blocklist=["canary", "wet paint"])


@pytest.fixture(params=["real", "fake"])
async def address(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """Where a guard listens."""
    if request.param == "fake":
        async with FakeGuardServer(FakeGuard()) as server:
            yield server.address
        return
    app = GuardApp(GuardSettings(drain_grace_s=0))
    await app.start()
    yield f"127.0.0.1:{app.port}"
    await app.stop()


@pytest.fixture
async def client(address: str) -> AsyncIterator[SessionClient]:
    """A session with that guard."""
    made = SessionClient(address)
    yield made
    await made.close()


def question(*texts: str, policy: pb.PolicyRef = CANARY, **more: object) -> pb.CheckInputRequest:
    parts = [
        pb.TextPart(path=f"messages[{idx}]", trust=pb.TRUST_USER, text=text)
        for idx, text in enumerate(texts)
    ]
    return pb.CheckInputRequest(request_id="r", policy=policy, parts=parts, **more)


async def judged(client: SessionClient, request: pb.CheckInputRequest) -> pb.Verdict:
    answer = await client.unary(CHECK_INPUT, request, timeout_s=5)
    return answer.verdict


async def opened(client: SessionClient, policy: pb.PolicyRef = CANARY) -> OutputCall:
    call = await client.start(CHECK_OUTPUT, timeout_s=10)
    call.send(pb.CheckOutputRequest(open=pb.OutputOpen(request_id="r", policy=policy)))
    return call


async def exchange(
    call: OutputCall, text: str, *, last: bool = False, choice: int = 0
) -> pb.CheckOutputResponse:
    """Send one piece; there is exactly one answer to it."""
    piece = pb.OutputText(choice_idx=choice, text=text, last=last)
    call.send(pb.CheckOutputRequest(text=piece))
    answer = await call.receive()
    assert answer is not None
    assert answer.choice_idx == choice
    assert answer.released_chars <= answer.scanned_chars
    return answer


async def test_clean_input_is_allowed(client: SessionClient) -> None:
    """With who judged and how long it took."""
    verdict = await judged(client, question("hello", "there"))
    assert (verdict.state, verdict.action) == (pb.VERDICT_STATE_CLEAN, pb.ACTION_ALLOW)
    assert verdict.policy_version
    assert verdict.elapsed_s > 0


@pytest.mark.parametrize("trust", pb.Trust.values())
@pytest.mark.parametrize("idx", [0, 2])
async def test_every_part_is_looked_at(
    client: SessionClient, trust: pb.Trust.ValueType, idx: int
) -> None:
    """A blocked word is refused wherever it stands and whoever it comes from."""
    request = question("hi", "there", "you")
    request.parts[idx].text, request.parts[idx].trust = "please CANARY now", trust
    verdict = await judged(client, request)
    assert (verdict.state, verdict.action) == (pb.VERDICT_STATE_HIT, pb.ACTION_BLOCK)
    found = verdict.findings[0]
    assert (found.category, found.part_idx, found.start, found.end) == ("blocklist", idx, 7, 13)
    assert found.action == pb.ACTION_BLOCK


async def test_positions_are_code_points(client: SessionClient) -> None:
    """Not bytes, not UTF-16 units."""
    verdict = await judged(client, question("é水🎈 canary"))
    assert [(found.start, found.end) for found in verdict.findings] == [(4, 10)]


async def test_an_opaque_part_is_not_evaluated(client: SessionClient) -> None:
    """And says why; it is never clean."""
    verdict = await judged(client, question("hi", opaque_paths=["messages[0].content[1]"]))
    assert verdict.state == pb.VERDICT_STATE_NOT_EVALUATED
    assert verdict.action == pb.ACTION_UNAVAILABLE
    assert verdict.reason


async def test_a_block_stands_beside_an_opaque_part(client: SessionClient) -> None:
    """It is refused for what was found."""
    verdict = await judged(client, question("canary", opaque_paths=["messages[1]"]))
    assert (verdict.state, verdict.action) == (pb.VERDICT_STATE_HIT, pb.ACTION_BLOCK)


async def test_an_unknown_policy_is_not_evaluated(client: SessionClient) -> None:
    """A key that names a missing policy is not an open door."""
    policy = pb.PolicyRef(policy="no such")
    verdict = await judged(client, question("hi", policy=policy))
    assert verdict.action == pb.ACTION_UNAVAILABLE
    async with await opened(client, policy) as call:
        answer = await exchange(call, "hello")
        assert answer.verdict.state == pb.VERDICT_STATE_NOT_EVALUATED
        assert answer.verdict.action == pb.ACTION_UNAVAILABLE
        assert (answer.released, answer.last) == ("", True)


async def test_the_off_policy_looks_for_nothing(client: SessionClient) -> None:
    """Not even for the key's own words."""
    policy = pb.PolicyRef(policy="off", blocklist=["canary"])
    verdict = await judged(client, question("a canary", policy=policy))
    assert verdict.state == pb.VERDICT_STATE_CLEAN
    async with await opened(client, policy) as call:
        assert (await exchange(call, "a can")).released == "a can"
        assert (await exchange(call, "ary", last=True)).released == "ary"


async def test_clean_output_comes_back_as_it_was(client: SessionClient) -> None:
    """Byte for byte, without a verdict, and the end is told."""
    pieces = ["Héllo ", "wor", "ld 🎈", ", a ca", "t and a canal", " "]
    async with await opened(client) as call:
        answers = [await exchange(call, piece) for piece in pieces]
        answers.append(await exchange(call, "boat", last=True))
    assert "".join(answer.released for answer in answers) == "".join(pieces) + "boat"
    assert [answer.last for answer in answers] == [False] * 6 + [True]
    assert not any(answer.HasField("verdict") for answer in answers)
    length = len("".join(pieces)) + 4
    assert (answers[-1].scanned_chars, answers[-1].released_chars) == (length, length)


async def test_text_that_begins_no_blocked_word_is_not_late(client: SessionClient) -> None:
    """Only a live beginning waits: of a blocked word, or of base64 (a word's first letters)."""
    async with await opened(client) as call:
        assert (await exchange(call, "hello ")).released == "hello "
        assert (await exchange(call, "a ca")).released == "a "
        assert (await exchange(call, "t ")).released == "cat "


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
async def test_a_blocked_word_never_leaves(client: SessionClient, size: int) -> None:
    """However it is cut: not the word, not its beginning, nothing after it."""
    text = "it says Canary on the wet  door. And more."
    async with await opened(client) as call:
        answers = [await exchange(call, text[at : at + size]) for at in range(0, len(text), size)]
        answers.append(await exchange(call, "", last=True))
    assert "".join(answer.released for answer in answers) == "it says "
    verdicts = [answer.verdict for answer in answers if answer.HasField("verdict")]
    assert [(one.state, one.action) for one in verdicts] == [
        (pb.VERDICT_STATE_HIT, pb.ACTION_BLOCK)
    ]
    assert [(found.start, found.end) for found in verdicts[0].findings] == [(8, 14)]
    assert verdicts[0].policy_version
    assert answers[-1].last


async def test_a_blocked_word_at_the_very_end_is_blocked(client: SessionClient) -> None:
    """The end of the text decides it."""
    async with await opened(client) as call:
        assert (await exchange(call, "the canary", last=False)).released == "the "[:4]
        answer = await exchange(call, "", last=True)
        assert answer.last
        assert answer.released == ""


async def test_held_text_is_released_at_the_end(client: SessionClient) -> None:
    """Half a word is no hit."""
    async with await opened(client) as call:
        assert (await exchange(call, "a can")).released == "a "
        answer = await exchange(call, "", last=True)
    assert (answer.released, answer.last, answer.HasField("verdict")) == ("can", True, False)


@pytest.mark.parametrize("size", [1, 3, 100])
async def test_a_choice_that_began_elsewhere_goes_on_here(client: SessionClient, size: int) -> None:
    """What came out there does not come out again; the rest is judged with what came before."""
    text = "it says Can"
    async with await opened(client) as call:
        resume = pb.OutputResume(choice_idx=2, released_chars=len("it says"))
        call.send(pb.CheckOutputRequest(resume=resume))
        for at in range(0, len(text), size):
            await exchange(call, text[at : at + size], choice=2)
        held = await exchange(call, "", choice=2)
        assert (held.scanned_chars, held.released_chars) == (len(text), len("it says "))
        answer = await exchange(call, "ary.", choice=2)
        assert (answer.released, answer.verdict.action) == ("", pb.ACTION_BLOCK)
    async with await opened(client) as call:
        call.send(pb.CheckOutputRequest(resume=pb.OutputResume(released_chars=7)))
        answers = [await exchange(call, text, last=True)]
        assert [(it.released, it.last) for it in answers] == [(" Can", True)]


async def test_what_has_begun_is_not_taken_over(client: SessionClient) -> None:
    """Text that was judged cannot be told to be out afterwards; nor without an opening."""
    async with await opened(client) as call:
        await exchange(call, "a")
        call.send(pb.CheckOutputRequest(resume=pb.OutputResume(released_chars=1)))
        with pytest.raises(InvalidRequest):
            await call.receive()
    call = await client.start(CHECK_OUTPUT, timeout_s=10)
    call.send(pb.CheckOutputRequest(resume=pb.OutputResume(released_chars=1)))
    with pytest.raises(InvalidRequest):
        await call.receive()


async def test_choices_are_judged_apart(client: SessionClient) -> None:
    """A block of one does not touch the other, nor do their texts join."""
    async with await opened(client) as call:
        await exchange(call, "the can", choice=0)
        assert (await exchange(call, "ary trio. ", choice=1)).released == "ary trio. "
        blocked = await exchange(call, "ary.", choice=0)
        assert blocked.verdict.action == pb.ACTION_BLOCK
        assert blocked.last
        assert (await exchange(call, " goes on ", choice=1)).released == " goes on "
        assert (await exchange(call, " more", choice=0)).released == ""


@pytest.mark.parametrize(
    "messages",
    [
        [pb.CheckOutputRequest(text=pb.OutputText(text="no open"))],
        [pb.CheckOutputRequest(open=pb.OutputOpen()), pb.CheckOutputRequest(open=pb.OutputOpen())],
        [pb.CheckOutputRequest()],
    ],
)
async def test_messages_out_of_turn_are_refused(
    client: SessionClient, messages: list[pb.CheckOutputRequest]
) -> None:
    """First open, once, then texts."""
    async with await client.start(CHECK_OUTPUT, timeout_s=5) as call:
        for message in messages:
            call.send(message)
        with pytest.raises(InvalidRequest):
            await call.receive()


async def test_text_after_the_end_of_a_choice_is_refused(client: SessionClient) -> None:
    """`last` is a promise."""
    async with await opened(client) as call:
        await exchange(call, "done", last=True)
        call.send(pb.CheckOutputRequest(text=pb.OutputText(text="more")))
        with pytest.raises(InvalidRequest):
            await call.receive()


async def test_the_plain_way_in_gives_the_same(address: str) -> None:
    """Tools use ordinary gRPC calls."""
    async with open_channel(address) as channel:
        answer = await call_unary(channel, CHECK_INPUT, question("a canary"), timeout_s=5)
    assert answer.verdict.action == pb.ACTION_BLOCK


async def test_moderation_answers_text_by_text(client: SessionClient) -> None:
    """In order, one result each, scores between 0 and 1, with the version that judged."""
    request = pb.ModerateRequest(request_id="r", tenant_id="t", key_id="k", texts=["a", "b", "c"])
    answer = await client.unary(MODERATE, request, timeout_s=10)
    assert len(answer.results) == 3
    for result in answer.results:
        assert result.scores
        assert all(0 <= score <= 1 for score in result.scores.values())
        assert set(result.flagged) <= set(result.scores)


async def test_what_was_sent_can_be_reported(client: SessionClient) -> None:
    """Also of a request that the guard never saw: that is what the report is for."""
    report = pb.SentReport(request_id="r", tenant_id="t", key_id="k", sent_chars=7)
    assert await client.unary(REPORT_SENT, report, timeout_s=5) == pb.SentReportResponse()
    many = pb.SentReports(reports=[report, report])
    assert await client.unary(REPORT_MANY, many, timeout_s=5) == pb.SentReportResponse()
