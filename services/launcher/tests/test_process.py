"""Nothing survives a supervisor, however it ends."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from headrace_launcher.ports import free_ports
from headrace_launcher.process import Spawner, StartError
from headrace_launcher.state_dir import StateDir
from headrace_testing.waiting import eventually

SCRIPT = Path(__file__).parent / "supervise_forever.py"


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_killed_supervisor_leaves_nothing_and_its_folder_is_free_again(tmp_path) -> None:
    """After SIGKILL child and grandchild are gone, though both ignore SIGTERM; then the lock is."""
    pid_file, folder = tmp_path / "grandchild", tmp_path / "state"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        SCRIPT,
        folder,
        str(free_ports(1)[0]),
        pid_file,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    child = int(await asyncio.wait_for(process.stdout.readline(), 20))
    grandchild = int(pid_file.read_text())
    assert is_running(child)
    assert is_running(grandchild)
    process.send_signal(signal.SIGKILL)
    await process.wait()

    state_dir = StateDir(folder)
    await asyncio.to_thread(state_dir.lock)  # waits for the reaper
    assert not is_running(child)
    assert not is_running(grandchild)
    state_dir.unlock()


async def test_the_parent_death_signal_reaches_a_child(tmp_path: Path) -> None:
    """Even without the reaper the kernel tells a child that its supervisor is gone."""
    code = (
        "import asyncio, os, sys, pathlib\n"
        "from headrace_launcher.process import Spawner\n"
        "async def main():\n"
        "    p = pathlib.Path(sys.argv[1])\n"
        "    argv = [sys.executable, '-I', '-S', '-c', 'import time; time.sleep(600)']\n"
        "    child = await Spawner().start(argv, {}, p / 'log', p)\n"
        "    await asyncio.sleep(0.5)\n"
        "    print(child.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 20)
    await eventually(lambda: not is_running(int(out)))


async def test_output_goes_to_the_log_and_a_stopped_process_can_be_stopped(tmp_path: Path) -> None:
    """SIGSTOP does not save a process from its end."""
    log = tmp_path / "one.log"
    async with Spawner() as spawner:
        argv = [sys.executable, "-c", "print('hello', flush=True); import time; time.sleep(600)"]
        process = await spawner.start(argv, {}, log, tmp_path)
        await eventually(lambda: "hello" in log.read_text())
        os.kill(process.pid, signal.SIGSTOP)
        assert await process.stop(5)
    assert not is_running(process.pid)


async def test_a_program_that_is_none_is_refused(tmp_path: Path) -> None:
    """Said before a process exists."""
    plain = tmp_path / "file"
    plain.write_text("no program")
    async with Spawner() as spawner:
        with pytest.raises(StartError, match="not a program"):
            await spawner.start([str(plain)], {}, tmp_path / "log", tmp_path)
