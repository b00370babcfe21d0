"""The supervisor with real processes."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from headrace_launcher.child_state import RestartPolicy
from headrace_launcher.fleet_view import ChildView
from headrace_launcher.plan import ChildSpec
from headrace_launcher.process import Spawner
from headrace_launcher.settings import child_environment
from headrace_launcher.state_dir import StateDir
from headrace_launcher.supervisor import Supervisor
from headrace_testing.waiting import eventually


@asynccontextmanager
async def supervised(
    state_dir: StateDir,
    *specs: ChildSpec,
    policy: RestartPolicy | None = None,
    on_change: Callable[[], None] = lambda: None,
) -> AsyncIterator[Supervisor]:
    async with Spawner() as spawner:
        supervisor = Supervisor(specs, state_dir, child_environment(), spawner, on_change, policy)
        supervisor.start()
        try:
            yield supervisor
        finally:
            await supervisor.stop()


def child(supervisor: Supervisor, name: str) -> ChildView:
    return next(view for view in supervisor.views() if view.name == name)


async def test_starts_what_others_need_first_and_stops_in_stages(state_dir, make_spec) -> None:
    """A child starts when those that it needs are ready; lower stages stop first."""
    seen: list[dict[str, str]] = []
    front = make_spec("front", needs=("store",), stage=0)
    store = make_spec("store", stage=1)
    async with Spawner() as spawner:
        supervisor = Supervisor(
            [store, front],
            state_dir,
            child_environment(),
            spawner,
            lambda: seen.append({v.name: v.state for v in supervisor.views()}),
        )
        supervisor.start()
        await supervisor.wait_ready()
        pids = [view.pid for view in supervisor.views()]
        await supervisor.stop()
    before = [it["store"] for it in seen if it["front"] == "waiting"]
    assert "ready" in before
    # A store that is busy may be unready at times; it is stopped when nobody needs it any more.
    assert {it["front"] for it in seen if it["store"] in ("stopping", "stopped")} == {"stopped"}
    assert seen[-1] == {"store": "stopped", "front": "stopped"}
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_a_killed_child_starts_again_at_the_same_address(state_dir, make_spec) -> None:
    """SIGKILL leads to a new process with the same port, and to ready again."""
    async with supervised(state_dir, make_spec("one")) as supervisor:
        await asyncio.wait_for(supervisor.wait_ready(), 15)
        before = child(supervisor, "one")
        os.kill(before.pid, signal.SIGKILL)
        await eventually(lambda: child(supervisor, "one").restarts == 1, within_s=15)
        await eventually(lambda: child(supervisor, "one").state == "ready", within_s=15)
        after = child(supervisor, "one")
        assert after.address == before.address
        assert after.pid != before.pid
        assert not supervisor.failed.is_set()


def ask(port: int) -> socket.socket:
    """Open a connection and send a request on it."""
    client = socket.create_connection(("127.0.0.1", port), timeout=15)
    client.sendall(b"GET / HTTP/1.0\r\n\r\n")
    return client


async def test_who_connects_while_a_child_is_away_waits_for_the_next_one(
    state_dir, make_spec
) -> None:
    """A socket that the supervisor holds refuses nobody until the fleet stops."""
    spec = make_spec("front", listen_fd_setting="STAND_IN_LISTEN_FD")
    port = int(spec.address.rpartition(":")[2])
    async with supervised(state_dir, spec) as supervisor:
        await asyncio.wait_for(supervisor.wait_ready(), 15)
        process = psutil.Process(child(supervisor, "front").pid)
        process.kill()
        await eventually(lambda: not is_running(process.pid), within_s=15)
        with ask(port) as client:
            assert b" 200 " in await asyncio.to_thread(client.recv, 100)
        assert child(supervisor, "front").restarts == 1
    with pytest.raises(ConnectionRefusedError):
        ask(port)


def handing_over(make_spec, *extra: str) -> ChildSpec:
    return make_spec(
        "front",
        *extra,
        listen_fd_setting="STAND_IN_LISTEN_FD",
        succession_fd_setting="STAND_IN_SUCCESSION_FD",
    )


async def test_a_child_that_is_told_to_stop_serves_until_its_successor_is_ready(
    state_dir, make_spec, tmp_path
) -> None:
    """Then it drains beside it; that is a restart, but no crash."""
    busy = tmp_path / "busy"
    busy.touch()
    spec = handing_over(make_spec, "--drain-file", str(busy))
    port = int(spec.address.rpartition(":")[2])
    policy = RestartPolicy(max_crashes=1)
    async with supervised(state_dir, spec, policy=policy) as supervisor:
        await asyncio.wait_for(supervisor.wait_ready(), 15)
        first = child(supervisor, "front").pid
        os.kill(first, signal.SIGTERM)
        is_served_by_next = False
        while not is_served_by_next:
            with ask(port) as client:
                answer = await asyncio.to_thread(client.recv, 1000)
            assert answer.startswith((b"HTTP/1.0 200", b"HTTP/1.0 503"))
            is_served_by_next = b" 200 " in answer and b"X-Process: %d" % first not in answer
        await eventually(lambda: child(supervisor, "front").state == "ready", within_s=15)
        assert child(supervisor, "front").pid != first
        assert child(supervisor, "front").restarts == 1
        assert is_running(first)
        busy.unlink()
        await eventually(lambda: not is_running(first), within_s=15)
        assert not supervisor.failed.is_set()


async def test_stop_waits_for_a_child_that_still_drains_and_kills_it_after_its_grace(
    state_dir, make_spec, tmp_path
) -> None:
    """It has its signal already; a second one would cut what it is answering."""
    busy = tmp_path / "busy"
    busy.touch()
    spec = handing_over(make_spec, "--drain-file", str(busy))
    async with supervised(state_dir, spec) as supervisor:
        await asyncio.wait_for(supervisor.wait_ready(), 15)
        first = child(supervisor, "front").pid
        os.kill(first, signal.SIGTERM)
        await eventually(lambda: child(supervisor, "front").restarts == 1, within_s=15)
        await eventually(lambda: child(supervisor, "front").state == "ready", within_s=15)
        second = child(supervisor, "front").pid
        stopping = asyncio.create_task(supervisor.stop())
        await eventually(lambda: child(supervisor, "front").state == "stopping", within_s=15)
        await asyncio.sleep(0.5)
        assert is_running(first)
        assert not stopping.done()
        busy.unlink()
        await stopping
        assert not is_running(first)
        assert not is_running(second)


async def test_an_address_that_cannot_be_had_fails_the_fleet(state_dir, make_spec) -> None:
    """It is named, and no process was started for it."""
    spec = make_spec("front", listen_fd_setting="STAND_IN_LISTEN_FD")
    port = int(spec.address.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        async with supervised(state_dir, spec) as supervisor:
            await asyncio.wait_for(supervisor.wait_ready(), 15)
            assert supervisor.failure.startswith(f"front cannot listen on 127.0.0.1:{port}")
            assert child(supervisor, "front").pid is None


async def test_a_crash_loop_fails_the_fleet_with_the_end_of_the_log(state_dir, make_spec) -> None:
    """The message names the child, how often it crashed, and what it said last."""
    policy = RestartPolicy(max_crashes=3)
    spec = make_spec("bad", "--exit-code", "7")
    async with supervised(state_dir, spec, make_spec("good"), policy=policy) as supervisor:
        await asyncio.wait_for(supervisor.failed.wait(), 15)
        assert supervisor.failure.startswith("bad crashed 3 times within 60 s")
        assert "stand-in is about to fail" in supervisor.failure
        assert child(supervisor, "bad").state == "failed"


async def test_wrong_settings_fail_the_fleet_at_once(state_dir, make_spec) -> None:
    """Exit code 2 is not tried again."""
    async with supervised(state_dir, make_spec("bad", "--exit-code", "2")) as supervisor:
        await asyncio.wait_for(supervisor.wait_ready(), 15)
        assert supervisor.failure.startswith("bad refused its settings")


async def test_a_program_that_does_not_exist_fails_the_fleet(state_dir, make_spec) -> None:
    """The message names the program."""
    spec = make_spec("ghost", argv=("/no/such/program",))
    async with supervised(state_dir, spec) as supervisor:
        await asyncio.wait_for(supervisor.wait_ready(), 15)
        assert "/no/such/program" in supervisor.failure


async def test_a_child_that_never_gets_ready_fails_the_fleet(
    state_dir, make_spec, tmp_path
) -> None:
    """Starting has a time limit."""
    flag = tmp_path / "not-ready"
    flag.touch()
    spec = make_spec("slow", "--not-ready-file", str(flag), start_timeout_s=0.5)
    async with supervised(state_dir, spec) as supervisor:
        await asyncio.wait_for(supervisor.wait_ready(), 15)
        assert supervisor.failure.startswith("slow was not ready within 0 s")


async def test_shows_a_child_that_is_not_ready_for_a_while(state_dir, make_spec, tmp_path) -> None:
    """A child that says 503 is shown as not ready, and not restarted."""
    flag = tmp_path / "not-ready"
    spec = make_spec("one", "--not-ready-file", str(flag))
    async with supervised(state_dir, spec) as supervisor:
        await asyncio.wait_for(supervisor.wait_ready(), 15)
        flag.touch()
        await eventually(lambda: child(supervisor, "one").state == "not ready", within_s=15)
        flag.unlink()
        await eventually(lambda: child(supervisor, "one").state == "ready", within_s=15)
        assert child(supervisor, "one").restarts == 0


async def test_a_child_that_holds_too_much_memory_starts_anew(
    state_dir, make_spec, tmp_path, monkeypatch
) -> None:
    """As often as it grows beyond its bound, and no other child does; none of it is a crash."""
    monkeypatch.setattr("headrace_launcher.supervisor._BOUNDS_CHECK_S", 0.05)
    hoards = [tmp_path / "bounded", tmp_path / "free"]
    specs = [
        make_spec("bounded", "--hoard-file", str(hoards[0]), max_memory_bytes=2**26),
        make_spec("free", "--hoard-file", str(hoards[1])),
    ]
    policy = RestartPolicy(max_crashes=1)
    async with supervised(state_dir, *specs, policy=policy) as supervisor:
        await asyncio.wait_for(supervisor.wait_ready(), 15)
        for num_restarts in (1, 2):
            for hoard in hoards:
                hoard.touch()
            await eventually(
                lambda num=num_restarts: child(supervisor, "bounded").restarts == num, within_s=15
            )
            await eventually(lambda: child(supervisor, "bounded").state == "ready", within_s=15)
        await eventually(lambda: not hoards[1].exists(), within_s=15)
        assert child(supervisor, "free").restarts == 0
        assert not supervisor.failed.is_set()


async def test_stop_takes_grandchildren_and_the_deaf_with_it(
    state_dir: StateDir, make_spec, tmp_path: Path
) -> None:
    """A child that ignores SIGTERM is killed after its grace, its own children with it."""
    pid_file = tmp_path / "grandchild"
    spec = make_spec("deaf", "--ignore-term", "--grandchild", str(pid_file), stop_grace_s=0.3)
    async with supervised(state_dir, spec) as supervisor:
        await asyncio.wait_for(supervisor.wait_ready(), 15)
        pids = [child(supervisor, "deaf").pid, int(pid_file.read_text())]
    await eventually(lambda: not any(is_running(pid) for pid in pids))


async def test_a_dead_child_leaves_no_grandchildren(state_dir, make_spec, tmp_path) -> None:
    """When a child is killed, what it started goes too, before the child starts again."""
    pid_file = tmp_path / "grandchild"
    spec = make_spec("one", "--grandchild", str(pid_file))
    async with supervised(state_dir, spec) as supervisor:
        await asyncio.wait_for(supervisor.wait_ready(), 15)
        grandchild = int(pid_file.read_text())
        os.kill(child(supervisor, "one").pid, signal.SIGKILL)
        await eventually(lambda: not is_running(grandchild), within_s=15)


async def test_stop_before_anything_is_ready_leaves_nothing(state_dir, make_spec) -> None:
    """A fleet may be stopped in the middle of its start."""
    specs = [make_spec("store"), make_spec("front", needs=("store",))]
    async with supervised(state_dir, *specs) as supervisor:
        await asyncio.sleep(0)
    assert [view.state for view in supervisor.views()] == ["stopped", "stopped"]
    assert all(view.pid is None for view in supervisor.views())


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
