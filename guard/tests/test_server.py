"""The process: settings, health, drain, and what it refuses to start with."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_common.errors import HeadraceError
from headrace_common.rpc import method_ref
from headrace_common.session import SessionClient
from headrace_common.settings import SettingsError
from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_guard.server import DESCRIPTOR, GuardApp
from headrace_guard.settings import GuardSettings
from headrace_testing.waiting import eventually, free_port
from headrace_testing.web import fetch

CHECK_INPUT = method_ref(DESCRIPTOR, "CheckInput", pb.CheckInputRequest, pb.CheckInputResponse)
CHECK_OUTPUT = method_ref(DESCRIPTOR, "CheckOutput", pb.CheckOutputRequest, pb.CheckOutputResponse)


def status(port: int, path: str) -> int:
    return fetch(f"http://127.0.0.1:{port}{path}")[0]


async def test_ready_once_it_serves_and_not_when_it_drains() -> None:
    """Running streams end in their own time; who asks meanwhile is answered, as no other may."""
    app = GuardApp(GuardSettings(drain_grace_s=5))
    await app.start()
    client = SessionClient(f"127.0.0.1:{app.port}")
    assert await asyncio.to_thread(status, app.metrics_port, "/ready") == 200
    async with await client.start(CHECK_OUTPUT, timeout_s=5) as call:
        call.send(pb.CheckOutputRequest(open=pb.OutputOpen()))
        call.send(pb.CheckOutputRequest(text=pb.OutputText(text="hello")))
        assert await call.receive() is not None
        stopping = asyncio.create_task(app.stop())
        await eventually(lambda: not app.lifecycle.is_ready)
        asked = pb.CheckInputRequest(parts=[pb.TextPart(text="hello")])
        said = await client.unary(CHECK_INPUT, asked, timeout_s=5)
        assert said.verdict.state == pb.VERDICT_STATE_CLEAN
        call.send(pb.CheckOutputRequest(text=pb.OutputText(text=" you", last=True)))
        answer = await call.receive()
        assert answer is not None
        assert answer.released == " you"
        call.half_close()
        assert await call.receive() is None
    await stopping
    await client.close()


async def test_a_guard_that_hands_over_judges_until_its_successor_serves() -> None:
    """On a socket that is not its own; who connects once it is let go waits for the next one."""
    asked = pb.CheckInputRequest(parts=[pb.TextPart(text="hello")])
    ours, theirs = socket.socketpair()
    with ours, socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        inherited = {"listen_fd": os.dup(held.fileno()), "succession_fd": theirs.detach()}
        app = GuardApp(GuardSettings(drain_grace_s=5, **inherited))
        await app.start()
        metrics_port = app.metrics_port
        app.lifecycle.stopping.set()
        stopping = asyncio.create_task(app.stop())
        ours.setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(ours, 1) == b"1"
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", metrics_port)
        client = SessionClient(address)
        assert (await client.unary(CHECK_INPUT, asked, timeout_s=5)).HasField("verdict")
        ours.close()
        await stopping
        with pytest.raises(HeadraceError):
            await client.unary(CHECK_INPUT, asked, timeout_s=0.5)
        successor = GuardApp(GuardSettings(listen_fd=os.dup(held.fileno())))
        await successor.start()
        assert (await client.unary(CHECK_INPUT, asked, timeout_s=5)).HasField("verdict")
        await client.close()
        await successor.stop()


def test_the_process_starts_alone_and_leaves_on_sigterm(tmp_path: Path) -> None:
    """Exit code 0, nothing else needed."""
    port = free_port()
    environment = {
        "HEADRACE_GUARD_LISTEN": f"127.0.0.1:{free_port()}",
        "HEADRACE_GUARD_METRICS_LISTEN": f"127.0.0.1:{port}",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace_guard"],
        env=environment,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
    )
    try:
        asyncio.run(_until_ready(port))
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
        assert process.returncode == 0, log
    finally:
        process.kill()
        process.communicate()


async def _until_ready(port: int) -> None:
    async def ready() -> bool:
        try:
            return await asyncio.to_thread(status, port, "/ready") == 200
        except OSError:
            return False

    await eventually(ready, within_s=30)


def test_a_wrong_policy_file_stops_the_start(tmp_path: Path) -> None:
    """A guard without its policy must not serve another one."""
    path = tmp_path / "policy.toml"
    path.write_text("version = 1")
    ended = subprocess.run(
        [sys.executable, "-m", "headrace_guard"],
        env={"HEADRACE_GUARD_POLICY_FILE": str(path)},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert b"version: a text is wanted" in ended.stderr


def test_settings_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typo or a wild value is refused."""
    monkeypatch.setenv("HEADRACE_GUARD_MAX_HELD_CHARS", "1")
    with pytest.raises(SettingsError, match="MAX_HELD_CHARS"):
        GuardSettings.load()
    monkeypatch.delenv("HEADRACE_GUARD_MAX_HELD_CHARS")
    monkeypatch.setenv("HEADRACE_GUARD_POLICY", "x")
    with pytest.raises(SettingsError, match="unknown"):
        GuardSettings.load()
