"""Makes and ends child processes so that none can stay behind.

Every child leads a session and process group of its own: the terminal's Ctrl-C does not reach it,
and killing the group takes its own children too. Against a supervisor that dies without cleaning up
stand the kernel's parent-death signal (`child_exec`) and a small reaper process (`reaper`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from headrace_launcher import child_exec, reaper

_KILL_WAIT_S = 5.0


class StartError(Exception):
    """A process could not be made; the message says why."""


class ChildProcess:
    """One running process and its group. Made by `Spawner`."""

    def __init__(self, process: asyncio.subprocess.Process, spawner: Spawner) -> None:
        self._process, self._spawner = process, spawner
        self.pid = process.pid

    @property
    def stdout(self) -> asyncio.StreamReader | None:
        """What the process prints, if it was started with a pipe."""
        return self._process.stdout

    async def wait(self) -> int:
        """Wait until the process has ended; whatever is left of its group is killed then."""
        code = await self._process.wait()
        self._signal_group(signal.SIGKILL)
        self._spawner.forget(self.pid)
        return code

    async def stop(self, grace_s: float) -> bool:
        """Ask the process to end, kill its group after the grace; tell whether it went itself."""
        self.ask_to_stop()
        return await self.see_off(grace_s)

    def ask_to_stop(self) -> None:
        """Send SIGTERM, unless the process has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def memory_bytes(self) -> int:
        """Return how much memory the process holds; 0 = it is gone, or may not be asked."""
        try:
            return psutil.Process(self.pid).memory_info().rss
        except psutil.Error:
            return 0

    async def see_off(self, grace_s: float) -> bool:
        """Wait for a process that has been asked to end, as `stop` does: a second signal cuts."""
        if self._process.returncode is not None:
            return True
        # A stopped (SIGSTOP) process would sleep through its SIGTERM.
        self._signal_group(signal.SIGCONT)
        try:
            async with asyncio.timeout(grace_s):
                await self.wait()
        except TimeoutError:
            self._signal_group(signal.SIGKILL)
            with contextlib.suppress(TimeoutError):  # stuck in the kernel: no signal helps
                async with asyncio.timeout(_KILL_WAIT_S):
                    await self.wait()
            return False
        return True

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


class Spawner:
    """Starts children; owns the reaper. Use as an async context manager.

    Args:
        held_descriptors: open files (locks) that the reaper holds too, until all children are gone.
    """

    def __init__(self, held_descriptors: Sequence[int] = ()) -> None:
        self._held_descriptors = held_descriptors
        self._reaper: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Spawner:
        self._reaper = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            reaper.__file__,
            stdin=asyncio.subprocess.PIPE,
            pass_fds=self._held_descriptors,
            start_new_session=True,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Let the reaper end: it ends every group that is still listed."""
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()
            await self._reaper.wait()

    async def start(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        cwd: Path,
        descriptors: Sequence[int] = (),
    ) -> ChildProcess:
        """Start a program whose output is appended to *log*; it inherits the *descriptors*.

        Raises:
            StartError: the program or the folder does not exist, or the system refuses.
        """
        try:
            with log.open("ab") as output:
                told = output.fileno()
                process = await self._exec(argv, environment, cwd, told, told, descriptors)
        except OSError as error:
            raise StartError(f"could not start {argv[0]}: {error.strerror or error}") from error
        return self._adopt(process)

    async def start_piped(
        self, argv: Sequence[str], environment: Mapping[str, str], log: Path, cwd: Path
    ) -> ChildProcess:
        """Like `start`, but stdout comes through `ChildProcess.stdout`; only stderr is logged."""
        pipe = asyncio.subprocess.PIPE
        try:
            with log.open("ab") as output:
                process = await self._exec(argv, environment, cwd, pipe, output.fileno())
        except OSError as error:
            raise StartError(f"could not start {argv[0]}: {error.strerror or error}") from error
        return self._adopt(process)

    def forget(self, group: int) -> None:
        """A group is gone."""
        self._tell(f"-{group}\n")

    async def _exec(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        cwd: Path,
        stdout: int,
        stderr: int,
        descriptors: Sequence[int] = (),
    ) -> asyncio.subprocess.Process:
        if not os.access(argv[0], os.X_OK):
            raise StartError(f"{argv[0]} is not a program that can be run")
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            child_exec.__file__,
            str(os.getpid()),
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=dict(environment),
            cwd=cwd,
            pass_fds=descriptors,
            start_new_session=True,
        )

    def _adopt(self, process: asyncio.subprocess.Process) -> ChildProcess:
        self._tell(f"+{process.pid}\n")
        return ChildProcess(process, self)

    def _tell(self, line: str) -> None:
        if self._reaper is not None and self._reaper.stdin is not None:
            with contextlib.suppress(ConnectionError):
                self._reaper.stdin.write(line.encode())
