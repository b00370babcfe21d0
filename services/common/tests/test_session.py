"""The session keeps gRPC's meaning; each rule holds through the session and through plain gRPC."""

from __future__ import annotations

import asyncio

import pytest

from headrace_common.errors import (
    BY_REASON,
    Deadline,
    Internal,
    InvalidRequest,
    QueueFull,
    RateLimited,
    ReplicaDraining,
    Unimplemented,
)
from headrace_common.rpc import MethodRef, call_stream, call_unary, method_ref, open_channel
from headrace_common.rpc_server import RpcServer
from headrace_common.session import SessionClient
from headrace_common.session_call import SessionCall
from headrace_common.session_items import WINDOW
from headrace_common.session_server import MAX_UNREAD, SessionServicer
from headrace_contracts.guard.v1 import guard_pb2
from headrace_contracts.guard.v1.guard_pb2 import (
    CheckInputRequest,
    CheckInputResponse,
    CheckOutputRequest,
    CheckOutputResponse,
)
from headrace_contracts.session.v1.session_pb2 import Item
from headrace_contracts.worker.v1 import worker_pb2
from headrace_testing.echo_guard import (
    BIDI,
    GUARD,
    UNARY,
    EchoGuard,
    EchoPeer,
    ask,
    by_session,
    say,
)
from headrace_testing.left_generators import left_generators
from headrace_testing.waiting import eventually

WORKER = worker_pb2.DESCRIPTOR.services_by_name["Worker"]


async def by_plain_call(
    peer: EchoPeer, request: CheckInputRequest, timeout_s: float = 5
) -> CheckInputResponse:
    async with open_channel(peer.address) as channel:
        return await call_unary(channel, UNARY, request, timeout_s)


WAYS = pytest.mark.parametrize("way", [by_session, by_plain_call])


@WAYS
async def test_an_answer_comes_back(peer, way) -> None:
    assert (await way(peer, ask("echo:hello"))).verdict.reason == "hello"


async def test_a_call_leaves_no_task_to_close_its_messages(peer) -> None:
    """Most handlers take one message, and a task costs more than that."""
    await by_session(peer, ask("echo:first"))
    with left_generators() as left:
        await by_session(peer, ask("echo:hello"))
        # Such a task would be made in the loop's next turn.
        await asyncio.sleep(0.05)
    assert not [it for it in left if "session" in it]


@WAYS
@pytest.mark.parametrize("reason", sorted(set(BY_REASON) - {"INTERNAL"}))
async def test_every_error_arrives_as_the_same_class(peer, way, reason) -> None:
    """Reason, message, param, retry time and metadata survive the wire."""
    with pytest.raises(BY_REASON[reason]) as caught:
        await way(peer, ask(f"error:{reason}"))
    error = caught.value
    assert type(error) is BY_REASON[reason]
    assert (error.public_message, error.param) == ("said so", "p")
    assert error.retry_after_s == 1.5
    assert error.metadata == {"limit": "rpm"}


@WAYS
async def test_a_crash_tells_nothing_from_inside(peer, way) -> None:
    with pytest.raises(Internal) as caught:
        await way(peer, ask("crash"))
    assert "secret" not in caught.value.public_message


@WAYS
async def test_a_cancellation_from_inside_is_told_to_the_caller(peer, way) -> None:
    """Nobody has left: the caller must not wait for its deadline."""
    with pytest.raises(Internal):
        await way(peer, ask("cancelled"))


@WAYS
async def test_a_deadline_ends_the_call_on_both_sides(peer, way) -> None:
    with pytest.raises(Deadline):
        await way(peer, ask("hang"), timeout_s=0.2)
    await eventually(lambda: peer.guard.cancelled == 1)


async def test_the_server_knows_the_deadline(peer) -> None:
    answer = await by_session(peer, ask("left"), timeout_s=7)
    assert 6 < float(answer.verdict.reason) <= 7


async def test_leaving_a_call_cancels_it_at_the_server(peer) -> None:
    task = asyncio.create_task(by_session(peer, ask("hang"), timeout_s=30))
    await eventually(lambda: peer.server.num_running == 1)
    task.cancel()
    await eventually(lambda: peer.guard.cancelled == 1)


async def test_many_calls_share_one_stream_and_do_not_mix(peer) -> None:
    answers = await asyncio.gather(*[by_session(peer, ask(f"echo:{i}")) for i in range(300)])
    assert [a.verdict.reason for a in answers] == [str(i) for i in range(300)]


async def test_a_bidirectional_call_answers_as_it_goes(peer) -> None:
    async with await peer.client.start(BIDI) as call:
        for text in ("one", "two"):
            call.send(say(text))
            answer = await call.receive()
            assert answer is not None
            assert answer.released == text
        call.half_close()
        assert await call.receive() is None


async def test_an_error_in_mid_stream_arrives_after_the_messages_before_it(peer) -> None:
    async with await peer.client.start(BIDI) as call:
        call.send(say("ok"))
        call.send(say("fail"))
        assert (await call.receive()).released == "ok"
        with pytest.raises(RateLimited):
            await call.receive()


async def test_a_reader_that_does_not_read_stops_the_writer(peer) -> None:
    """The server produces no more than the window; reading lets it go on, and nothing is lost."""
    async with await peer.client.start(BIDI) as call:
        call.send(say("x", repeat=500))
        call.half_close()
        await asyncio.sleep(0.3)
        assert peer.guard.produced <= WINDOW + 1
        assert len([m async for m in call]) == 500


async def test_a_half_close_arrives_behind_as_many_messages_as_may_wait(peer) -> None:
    """It needs no place of its own; messages beyond those are refused."""
    async with await peer.client.start(BIDI, say("wait"), timeout_s=5) as call:
        for _ in range(MAX_UNREAD):
            call.send(say("x"))
        call.half_close()
        await by_session(peer, ask("echo:all has come"))
        peer.guard.gate.set()
        assert len([m async for m in call]) == 1 + MAX_UNREAD


async def test_messages_that_nobody_reads_are_refused(peer) -> None:
    async with await peer.client.start(BIDI, say("wait"), timeout_s=5) as call:
        for _ in range(MAX_UNREAD + 2):
            call.send(say("x"))
        with pytest.raises(QueueFull):
            await call.receive()


async def test_a_call_without_its_message_is_the_callers_mistake(peer) -> None:
    async with await peer.client.start(UNARY, timeout_s=5) as call:
        call.half_close()
        with pytest.raises(InvalidRequest, match="no message"):
            await call.receive()


async def test_closing_a_stream_early_cancels_it(peer) -> None:
    async with await peer.client.start(BIDI) as call:
        call.send(say("x"))
        await call.receive()
    await eventually(lambda: peer.guard.cancelled == 1)


@WAYS
async def test_draining_lets_running_calls_finish_and_refuses_new_ones(peer, way) -> None:
    running = asyncio.create_task(way(peer, ask("wait:done"), timeout_s=30))
    await eventually(lambda: peer.server.num_running == 1)
    stopping = asyncio.create_task(peer.server.stop(5))
    await asyncio.sleep(0.05)
    with pytest.raises(ReplicaDraining):
        await way(peer, ask("echo:late"))
    peer.guard.gate.set()
    assert (await running).verdict.reason == "done"
    await stopping


async def test_an_unknown_method_is_named(peer) -> None:
    ref = MethodRef("headrace.guard.v1.Guard/Nothing", CheckInputRequest, CheckInputResponse)
    with pytest.raises(Unimplemented):
        await peer.client.unary(ref, ask("x"), timeout_s=2)


def test_a_reference_with_wrong_types_is_refused() -> None:
    with pytest.raises(TypeError):
        method_ref(GUARD, "CheckInput", CheckOutputRequest, CheckInputResponse)


def test_a_servicer_without_all_methods_is_refused() -> None:
    with pytest.raises(TypeError, match="Generate"):
        RpcServer("127.0.0.1:0", [(WORKER, object())])


async def test_plain_streams_close_when_their_reader_leaves(peer) -> None:
    ref = MethodRef("headrace.guard.v1.Guard/CheckOutput", CheckOutputRequest, CheckOutputResponse)
    async with open_channel(peer.address) as channel:
        stream = call_stream(channel, ref, say("x", repeat=100_000), timeout_s=10)
        async for _ in stream:
            break
        await stream.aclose()
        await eventually(lambda: peer.guard.cancelled == 1)


async def test_a_port_in_use_is_told_plainly(peer) -> None:
    second = RpcServer(peer.address, [(GUARD, EchoGuard())])
    with pytest.raises(OSError, match="cannot listen"):
        await second.start()
    await second.stop(0)


async def test_a_call_with_one_message_each_way_is_one_item_each_way(monkeypatch) -> None:
    """Opening, message and end share an item; an answer taken early needs no cancel."""
    seen: list[Item] = []
    taken = SessionServicer._handle

    def note(servicer, item, calls, outbox) -> None:
        seen.append(item)
        taken(servicer, item, calls, outbox)

    monkeypatch.setattr(SessionServicer, "_handle", note)
    server = RpcServer("127.0.0.1:0", [(GUARD, EchoGuard())])
    await server.start()
    client = SessionClient(f"127.0.0.1:{server.port}")
    delivered: list[object] = []
    kept = SessionCall.deliver

    def deliver(call, item) -> None:
        delivered.append(item)
        kept(call, item)

    monkeypatch.setattr(SessionCall, "deliver", deliver)
    answer = await client.unary(UNARY, CheckInputRequest(request_id="echo:x"), timeout_s=5)
    assert answer.verdict.reason == "x"
    call = await client.start(UNARY, CheckInputRequest(request_id="echo:y"), is_only=True)
    assert (await call.receive()).verdict.reason == "y"
    call.cancel()
    await client.unary(UNARY, CheckInputRequest(request_id="echo:z"), timeout_s=5)
    assert [item.kind for item in seen] == [Item.KIND_OPEN] * 3
    assert [item.kind for item in delivered] == [Item.KIND_MESSAGE] * 3
    await client.close()
    await server.stop(0)


async def test_what_is_ready_is_taken_without_waiting_up_to_the_end(peer) -> None:
    """Messages only: the end, and errors, are told by `receive`."""
    async with await peer.client.start(BIDI) as call:
        call.send(CheckOutputRequest(text=guard_pb2.OutputText(text="a", choice_idx=3)))
        call.half_close()
        assert (await call.receive()).released == "a"
        await eventually(lambda: peer.guard.cancelled == 1)
        await asyncio.sleep(0.05)
        assert [message.released for message in call.take_ready()] == ["a", "a"]
        assert call.take_ready() == []
        assert await call.receive() is None


async def test_a_shortcut_takes_messages_without_waking_the_waiter(peer) -> None:
    """Only what it does not take, its own no and its own errors come to whoever waits."""
    async with await peer.client.start(BIDI, say("a", 3)) as call:
        taken: list[str] = []

        def shortcut() -> bool:
            taken.extend(message.released for message in call.take_ready())
            if "boom" in taken:
                raise ValueError("its own")
            return "enough" not in taken

        waiting = asyncio.create_task(call.wait(shortcut))
        await eventually(lambda: taken == ["a"] * 3)
        call.send(say("b", 2))
        await eventually(lambda: taken == ["a"] * 3 + ["b"] * 2)
        assert not waiting.done()
        call.send(say("enough"))
        assert await waiting is False
        taken.clear()
        call.send(say("boom"))
        with pytest.raises(ValueError, match="its own"):
            await call.wait(shortcut)
        taken.clear()
        call.send(say("fail"))
        assert await call.wait(shortcut) is True
        with pytest.raises(RateLimited):
            await call.receive()
