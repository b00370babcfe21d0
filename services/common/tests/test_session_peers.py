"""Peers that are silent, frozen or lost: what the session tells its callers, and when."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from headrace_common import session, session_call
from headrace_common.errors import Deadline, HeadraceError, ReplicaDraining, ReplicaLost
from headrace_common.frame_socket import SILENCE_S
from headrace_common.rpc_server import RpcServer
from headrace_common.session import SessionClient
from headrace_common.session_server import SessionServicer
from headrace_contracts.guard.v1.guard_pb2 import CheckInputResponse
from headrace_contracts.session.v1.session_pb2 import Item
from headrace_testing.echo_guard import GUARD, UNARY, EchoGuard, EchoPeer, ask, by_session
from headrace_testing.freezable import FreezableWay
from headrace_testing.waiting import eventually


async def test_a_peer_that_ends_a_connection_at_once_is_away() -> None:
    """While a process is killed its socket still takes connections, which end without a word."""

    async def end(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(end, "127.0.0.1", 0)
    client = SessionClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        with pytest.raises(ReplicaLost):
            await client.unary(UNARY, ask("echo:1"), timeout_s=5)
        assert client.is_away
    finally:
        await client.close()
        server.close()


async def test_a_lost_server_fails_running_calls_and_the_next_ones_reach_its_successor(
    peer,
) -> None:
    running = asyncio.create_task(by_session(peer, ask("hang"), timeout_s=30))
    await eventually(lambda: peer.server.num_running == 1)
    await peer.server.stop(0)
    with pytest.raises((ReplicaLost, ReplicaDraining)):
        await running
    with pytest.raises(HeadraceError):
        await by_session(peer, ask("echo:1"))
    successor = RpcServer(peer.address, [(GUARD, EchoGuard())])
    await successor.start()
    try:
        answer = await eventually(lambda: _or_none(peer))
        assert answer.verdict.reason == "again"
    finally:
        await peer.client.close()
        await successor.stop(0)


async def _or_none(peer: EchoPeer) -> CheckInputResponse | None:
    try:
        return await by_session(peer, ask("echo:again"))
    except HeadraceError:
        return None


async def test_connecting_is_part_of_a_calls_time(monkeypatch) -> None:
    """A peer that accepts and says nothing costs each caller its own time, not the connecting's."""
    monkeypatch.setattr(session, "_CONNECT_TIMEOUT_S", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = SessionClient(f"127.0.0.1:{silent.getsockname()[1]}")
        async with asyncio.timeout(20):
            with pytest.raises(Deadline):
                await client.unary(UNARY, ask("echo:x"), timeout_s=0.1)
        await client.close()


async def test_a_caller_that_gives_up_does_not_end_the_connecting_of_others(peer) -> None:
    """Nor is a slow peer never reached because each caller's time is short."""
    with pytest.raises(Deadline):
        await peer.client.start(UNARY, ask("echo:x"), timeout_s=0.0)
    waiting = asyncio.create_task(by_session(peer, ask("echo:x")))
    leaving = asyncio.create_task(by_session(peer, ask("echo:y")))
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await waiting).verdict.reason == "x"


async def test_only_the_first_callers_wait_for_a_peer_that_does_not_answer(monkeypatch) -> None:
    """Tries go on behind their backs, and the first that succeeds opens the door."""
    monkeypatch.setattr(session, "_CONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(session, "_UNREACHABLE_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        client = SessionClient(address)
        began_s = time.monotonic()
        with pytest.raises(ReplicaLost):
            await client.unary(UNARY, ask("echo:x"), timeout_s=30)
        assert time.monotonic() - began_s >= 0.2
        for _ in range(2):
            await asyncio.sleep(0.02)
            with pytest.raises(ReplicaLost):
                client.unary(UNARY, ask("echo:x"), timeout_s=30).send(None)
    server = RpcServer(address, [(GUARD, EchoGuard())])
    await server.start()

    async def answers() -> bool:
        try:
            answer = await client.unary(UNARY, ask("echo:x"), timeout_s=30)
        except ReplicaLost:
            return False
        return answer.verdict.reason == "x"

    await eventually(answers)
    await client.close()
    await server.stop(0)


async def test_a_peer_that_was_silent_serves_the_first_call_after_its_return(monkeypatch) -> None:
    """Nobody has to be refused to find out that it is back."""
    monkeypatch.setattr(session, "_CONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(session, "_UNREACHABLE_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        client = SessionClient(address)
        with pytest.raises(ReplicaLost):
            await client.unary(UNARY, ask("echo:x"), timeout_s=30)
        # More than one try runs into the timeout.
        await asyncio.sleep(0.5)
    server = RpcServer(address, [(GUARD, EchoGuard())])
    await server.start()
    await eventually(lambda: client._stream is not None)
    assert (await client.unary(UNARY, ask("echo:y"), timeout_s=30)).verdict.reason == "y"
    await client.close()
    await server.stop(0)


async def test_a_closed_client_tries_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its last try failed so shortly before that nobody was told yet."""
    monkeypatch.setattr(session, "_UNREACHABLE_S", 0.01)
    times_out, num_tries = asyncio.Event(), 0

    async def connect(_stream: object) -> None:
        nonlocal num_tries
        num_tries += 1
        await times_out.wait()
        raise TimeoutError

    monkeypatch.setattr(session_call.ClientStream, "connect", connect)
    client = SessionClient("127.0.0.1:1")
    trying = client._try()
    await eventually(lambda: num_tries == 1)
    times_out.set()
    # One turn: the try has failed, and what is to follow has not been called.
    await asyncio.sleep(0)
    assert trying.done()
    assert client._trying is trying
    await client.close()
    await asyncio.sleep(0.1)
    assert num_tries == 1


@pytest.mark.parametrize("scheme", ["", "grpc://"])
async def test_a_frozen_peer_costs_its_clients_patience_once(peer, scheme) -> None:
    """Far less than the silence that ends a connection; thawed, it serves as before."""
    async with FreezableWay(peer.address) as way:
        client = SessionClient(scheme + way.address, patience_s=0.2)
        assert (await client.unary(UNARY, ask("echo:x"), timeout_s=30)).verdict.reason == "x"
        way.freeze()
        began_s = time.monotonic()
        with pytest.raises(ReplicaLost):
            await client.unary(UNARY, ask("echo:y"), timeout_s=30)
        assert time.monotonic() - began_s < SILENCE_S / 2
        with pytest.raises(ReplicaLost):
            # The next one is told so without waiting at all.
            client.unary(UNARY, ask("echo:y"), timeout_s=30).send(None)
        way.thaw()

        async def answers() -> bool:
            try:
                answer = await client.unary(UNARY, ask("echo:z"), timeout_s=30)
            except ReplicaLost:
                return False
            return answer.verdict.reason == "z"

        await eventually(answers)
        await client.close()


async def test_a_peer_that_lives_is_waited_for(peer, monkeypatch) -> None:
    """However long its answer takes; and the call's own time still counts."""
    monkeypatch.setattr(session_call, "_LOOK_AFTER_S", 0.01)
    monkeypatch.setattr(session_call, "LOOK_AGAIN_S", 0.01)
    asked: list[float] = []
    ask_for_life = session_call.ClientStream.ask_for_life

    def noted(stream: session_call.ClientStream) -> float:
        asked.append(ask_for_life(stream))
        return asked[-1]

    monkeypatch.setattr(session_call.ClientStream, "ask_for_life", noted)
    client = SessionClient(peer.address, patience_s=0.2)
    waiting = asyncio.create_task(client.unary(UNARY, ask("wait:done"), timeout_s=30))
    await eventually(lambda: len(asked) >= 2)
    peer.guard.gate.set()
    assert (await waiting).verdict.reason == "done"
    with pytest.raises(Deadline):
        await client.unary(UNARY, ask("hang"), timeout_s=0.3)
    await client.close()


async def test_many_waiting_calls_ask_one_question(peer, monkeypatch) -> None:
    """An overloaded peer is not burdened by being asked how it is."""
    monkeypatch.setattr(session_call, "_LOOK_AFTER_S", 0.05)
    questions: list[Item] = []
    handle = SessionServicer._handle

    def noted(servicer: SessionServicer, item: Item, *rest: object) -> None:
        if item.method == session_call._LIFE:
            questions.append(item)
        handle(servicer, item, *rest)

    monkeypatch.setattr(SessionServicer, "_handle", noted)
    client = SessionClient(peer.address, patience_s=0.2)
    calls = [
        asyncio.create_task(client.unary(UNARY, ask("wait:done"), timeout_s=30)) for _ in range(100)
    ]
    await eventually(lambda: questions)
    peer.guard.gate.set()
    await asyncio.gather(*calls)
    assert len(questions) == 1
    await client.close()


@pytest.mark.parametrize("is_connected", [False, True])
async def test_an_own_pause_is_no_silence_of_the_peer(peer, monkeypatch, is_connected) -> None:
    """Neither while connecting nor while an answer is waited for."""
    monkeypatch.setattr(session, "_CONNECT_TIMEOUT_S", 0.2)
    if is_connected:
        await by_session(peer, ask("echo:x"))
    asked = asyncio.create_task(by_session(peer, ask("echo:y"), timeout_s=0.3))
    for _ in range(2):
        await asyncio.sleep(0)
        time.sleep(0.7)  # noqa: ASYNC251 - that the loop stands still is the point
    assert (await asked).verdict.reason == "y"


async def test_closing_ends_a_try_to_connect_and_those_who_wait_for_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = SessionClient(f"127.0.0.1:{silent.getsockname()[1]}")
        waiting = asyncio.create_task(client.unary(UNARY, ask("echo:x"), timeout_s=30))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(ReplicaLost):
            await waiting
