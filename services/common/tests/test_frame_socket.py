"""Faults on a session's connection: cut frames, garbage, silence, peers that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
import uvloop

from headrace_common import frame_socket
from headrace_common.errors import HeadraceError, ReplicaLost
from headrace_common.frame_socket import (
    MAX_FRAME_BYTES,
    MAX_FRAME_ITEMS,
    PREFACE,
    FrameSocket,
)
from headrace_common.rpc import method_ref
from headrace_common.rpc_front import RpcFront
from headrace_common.session import SessionClient
from headrace_common.session_items import encoded
from headrace_contracts.guard.v1 import guard_pb2
from headrace_contracts.session.v1.session_pb2 import Frame, Item
from headrace_testing.waiting import eventually

GUARD = guard_pb2.DESCRIPTOR.services_by_name["Guard"]
CHECK = method_ref(GUARD, "CheckInput", guard_pb2.CheckInputRequest, guard_pb2.CheckInputResponse)


class Peer:
    """The server's end, its frames and its loss noted."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.lost = 0
        self.sockets: list[FrameSocket] = []

    def connect(self) -> FrameSocket:
        end = FrameSocket(self.frames.append, self._lose)
        self.sockets.append(end)
        return end

    def _lose(self) -> None:
        self.lost += 1


@pytest.fixture
async def peer() -> AsyncIterator[tuple[Peer, int]]:
    one = Peer()
    front = RpcFront(one.connect, "unix-abstract:headrace-nobody", 0)
    yield one, await front.listen("127.0.0.1", 0)
    front.close()
    await asyncio.sleep(0)


def framed(*payloads: bytes) -> bytes:
    frames = [Frame(items=[Item(call_id=1, payload=it)]).SerializeToString() for it in payloads]
    return b"".join(struct.pack("<I", len(it)) + it for it in frames)


async def until_the_end(reader: asyncio.StreamReader) -> None:
    """Read until the peer has ended the connection, by a reset or not."""
    with contextlib.suppress(ConnectionResetError):
        while await reader.read(100):
            pass


async def test_a_frame_arrives_whole_however_it_is_cut(peer) -> None:
    """Every cut of preface and two frames gives the same two frames."""
    one, port = peer
    data = PREFACE + framed(b"first", b"second")
    for at in range(0, len(data), 7):
        one.frames.clear()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data[:at])
        await writer.drain()
        await asyncio.sleep(0.002)
        writer.write(data[at:])
        await eventually(lambda: len(one.frames) == 2)
        assert [it.items[0].payload for it in one.frames] == [b"first", b"second"]
        writer.close()


@pytest.mark.parametrize(
    "garbage",
    [struct.pack("<I", 9) + b"\xff" * 9, struct.pack("<I", MAX_FRAME_BYTES + 1)],
    ids=["no frame", "too large"],
)
async def test_what_is_no_frame_ends_the_connection(peer, garbage) -> None:
    one, port = peer
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + garbage)
    await until_the_end(reader)
    await eventually(lambda: one.lost == 1)
    assert one.frames == []
    writer.close()


async def test_what_is_neither_session_nor_grpc_is_let_go(peer) -> None:
    """Bytes that are no preface go to gRPC; where there is none the connection ends."""
    one, port = peer
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    await until_the_end(reader)
    assert one.sockets == []
    writer.close()


def test_what_the_server_behind_says_first_is_not_lost() -> None:
    """gRPC greets before it has read anything, maybe before the connection here is noted."""
    behind = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []

    def greet() -> None:
        for _ in range(50):
            connection, _ = behind.accept()
            connection.sendall(b"settings")
            held.append(connection)

    async def ask_often() -> list[bytes]:
        front = RpcFront(Peer().connect, "127.0.0.1:0", behind.getsockname()[1])
        port, heard = await front.listen("127.0.0.1", 0), []
        for _ in range(50):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"PRI * HTTP/2.0 ..........")
            async with asyncio.timeout(30):
                heard.append(await reader.readexactly(8))
            writer.close()
            await writer.wait_closed()
        front.close()
        await asyncio.sleep(0.05)
        return heard

    thread = threading.Thread(target=greet)
    thread.start()
    try:
        # The services' own loop: it hands over what comes first at once.
        assert uvloop.run(ask_often()) == [b"settings"] * 50
    finally:
        while thread.is_alive():
            socket.create_connection(behind.getsockname()).close()
            thread.join(0.01)
        for connection in (behind, *held):
            connection.close()


async def test_a_burst_leaves_turns_to_those_who_read(peer) -> None:
    """Thousands of frames in one piece come in portions, in order, also if the peer then leaves."""
    one, port = peer
    payloads = [b"%d" % n for n in range(2000)]
    counts: list[int] = []

    async def count() -> None:
        while True:
            counts.append(len(one.frames))
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + framed(*payloads))
    writer.close()
    await eventually(lambda: one.lost == 1)
    counting.cancel()
    assert [frame.items[0].payload for frame in one.frames] == payloads
    assert max(after - before for before, after in pairwise(counts)) <= MAX_FRAME_ITEMS


async def test_a_cut_in_mid_frame_loses_the_peer_and_not_the_process(peer) -> None:
    one, port = peer
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + framed(b"whole", b"cut")[:-2])
    await eventually(lambda: len(one.frames) == 1)
    writer.transport.abort()
    await eventually(lambda: one.lost == 1)


async def test_a_silent_peer_is_lost(peer, monkeypatch) -> None:
    """A frozen process keeps its connections open and says nothing."""
    monkeypatch.setattr(frame_socket, "BEAT_S", 0.02)
    monkeypatch.setattr(frame_socket, "SILENCE_S", 0.1)
    one, port = peer
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE)
    await eventually(lambda: one.lost == 1)
    writer.close()


async def test_a_client_may_bear_less_silence(peer, monkeypatch) -> None:
    """It looks exactly then, not at its next beat."""
    monkeypatch.setattr(frame_socket, "BEAT_S", 2.0)

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(struct.pack("<I", 0))
        await until_the_end(reader)
        writer.close()

    mute = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = mute.sockets[0].getsockname()[1]
    client = SessionClient(f"127.0.0.1:{port}", silence_s=2.2)
    call = await client.start(CHECK, timeout_s=5)
    began_s = time.monotonic()
    with pytest.raises(ReplicaLost):
        await call.receive()
    assert 2.0 < time.monotonic() - began_s < 3.8
    await client.close()
    mute.close()


async def test_who_stood_still_reads_before_judging(peer, monkeypatch) -> None:
    """The beats of a living peer came meanwhile, and lie unread."""
    monkeypatch.setattr(frame_socket, "BEAT_S", 0.02)
    monkeypatch.setattr(frame_socket, "SILENCE_S", 0.2)
    one, port = peer
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE)
    await eventually(lambda: bool(one.sockets) and one.sockets[0].is_open)
    (end,) = one.sockets
    # As after a second without a turn, when timers come before what was received.
    end.heard_s = end._loop.time() - 1.0
    end._beat_due_s = end.heard_s + 0.02
    end._beat()
    assert one.lost == 0
    assert end.is_open
    await eventually(lambda: one.lost == 1)
    writer.close()


async def test_a_living_peer_is_not_lost_for_having_nothing_to_say(peer, monkeypatch) -> None:
    monkeypatch.setattr(frame_socket, "BEAT_S", 0.02)
    monkeypatch.setattr(frame_socket, "SILENCE_S", 0.2)
    one, port = peer
    client = SessionClient(f"127.0.0.1:{port}")
    call = await client.start(CHECK, timeout_s=5)
    await asyncio.sleep(0.5)
    assert one.lost == 0
    call.cancel()
    await client.close()


async def test_a_peer_that_does_not_read_makes_items_wait(peer) -> None:
    """Beyond the transport's buffer nothing is encoded; all of it arrives once the peer reads."""
    one, port = peer
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**14)
    writer.write(PREFACE)
    await eventually(lambda: bool(one.sockets))
    sent = 0
    while not one.sockets[0].is_paused:
        one.sockets[0].put(encoded(Item(call_id=1, payload=b"x" * 50_000)))
        sent += 1
        await asyncio.sleep(0)
    written = one.sockets[0].num_written
    for _ in range(50):
        one.sockets[0].put(encoded(Item(call_id=1, payload=b"x" * 50_000)))
        await asyncio.sleep(0)
    assert one.sockets[0].num_written == written
    received = 0
    while received < sent + 50:
        (size,) = struct.unpack("<I", await reader.readexactly(4))
        received += len(Frame.FromString(await reader.readexactly(size)).items)
    assert received == sent + 50
    writer.close()


async def test_a_peer_that_accepts_and_says_nothing_does_not_hold_a_caller() -> None:
    """As a frozen process does: the kernel takes the connection, nobody answers."""
    server = socket.create_server(("127.0.0.1", 0))
    client = SessionClient(f"127.0.0.1:{server.getsockname()[1]}")
    with pytest.raises(ReplicaLost, match="does not answer"):
        await client.start(CHECK, timeout_s=5)
    with pytest.raises(HeadraceError):
        await client.start(CHECK, timeout_s=5)
    await client.close()
    server.close()
