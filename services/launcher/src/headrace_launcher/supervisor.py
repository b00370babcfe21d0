"""Keeps a fleet's children running: starts them in order, restarts them, stops them in order.

One task per child follows its `ChildLife`; here is the I/O that the state machine asks for.
The first child that gives up decides the fleet: `failure` is set and everything is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace_common.lifecycle import cancel_and_wait
from headrace_launcher import probes
from headrace_launcher.child_state import (
    ChildLife,
    ChildState,
    GiveUp,
    Gone,
    RestartPolicy,
    describe_exit,
)
from headrace_launcher.fleet_view import ChildView
from headrace_launcher.log_file import cut_if_long, last_lines
from headrace_launcher.plan import ChildSpec, ProbeKind
from headrace_launcher.ports import bound_socket
from headrace_launcher.process import ChildProcess, Spawner, StartError
from headrace_launcher.state_dir import StateDir
from headrace_launcher.succession import Succession

_log = logging.getLogger(__name__)
_STARTING_POLL_S = 0.2
_RUNNING_POLL_S = 1.0
_BOUNDS_CHECK_S = 10.0
_PROBES: dict[ProbeKind, Callable[[str], probes.Probe]] = {
    ProbeKind.HTTP: probes.http_ready,
    ProbeKind.REDIS: probes.redis_ready,
    ProbeKind.KAFKA: probes.kafka_ready,
}

Progress = Callable[[str], Awaitable[float | None]]


@dataclass(eq=False)
class _Process:
    """A process of a child, and how it hands over to the next one, if it can."""

    process: ChildProcess
    succession: Succession | None

    def let_go(self) -> None:
        if self.succession is not None:
            self.succession.let_go()

    def close(self) -> None:
        if self.succession is not None:
            self.succession.close()


@dataclass
class _Child:
    spec: ChildSpec
    life: ChildLife
    log: Path
    process: _Process | None = None
    # Told to stop by somebody else, they serve until the next one is ready, then drain.
    leaving: list[_Process] = field(default_factory=list)
    # Its listening socket, from the first start to the fleet's stop.
    listener: socket.socket | None = None
    progress_ratio: float | None = None
    detail: str = ""
    ready_once: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def probe(self) -> probes.Probe:
        address = self.spec.metrics_address or self.spec.address
        return _PROBES[self.spec.probe](address)

    def listening(self) -> int:
        """Return the descriptor of its listening socket, which is bound the first time.

        Raises:
            StartError: the address cannot be had.
        """
        if self.listener is None:
            try:
                self.listener = bound_socket(self.spec.address)
            except OSError as error:
                raise StartError(error.strerror) from error
        return self.listener.fileno()

    def bound_memory(self) -> None:
        """Tell a process that holds too much to stop; the next one is then started as ever."""
        most = self.spec.max_memory_bytes
        if most is None or self.process is None or self.life.state is not ChildState.READY:
            return
        if (held := self.process.process.memory_bytes()) > most:
            _log.info("%s holds %d MiB and starts anew", self.spec.name, held >> 20)
            self.process.process.ask_to_stop()

    def processes(self) -> list[_Process]:
        return [*self.leaving, *([] if self.process is None else [self.process])]

    def let_go(self) -> None:
        """Let its processes stop once they are told to: no further one will come."""
        # Our copy of the listening socket: it ends with the process that listens.
        if self.listener is not None:
            self.listener.close()
        for process in self.processes():
            process.let_go()

    def view(self) -> ChildView:
        return ChildView(
            name=self.spec.name,
            role=self.spec.role,
            state=self.life.state.value,
            address=self.spec.address,
            metrics_address=self.spec.metrics_address,
            admin_address=self.spec.admin_address,
            pid=self.life.pid,
            restarts=self.life.num_restarts,
            progress_ratio=self.progress_ratio,
            detail=self.detail,
            log=str(self.log),
        )


class Supervisor:
    """Runs the children of one fleet.

    Args:
        specs: in order of start.
        state_dir: where logs go; also the children's working directory.
        environment: what children inherit; a spec's own settings win over it.
        spawner: makes the processes.
        on_change: called on every change that `views` shows.
        policy: when a crashing child ends the fleet.
        gates: events by name that specs may need, as they need other children.
        loading_progress: asks the worker at an address how far it has loaded: 0..1, None = unknown.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        state_dir: StateDir,
        environment: Mapping[str, str],
        spawner: Spawner,
        on_change: Callable[[], None],
        policy: RestartPolicy | None = None,
        loading_progress: Progress | None = None,
        gates: Mapping[str, asyncio.Event] | None = None,
    ) -> None:
        policy = policy or RestartPolicy()
        self._children = [
            _Child(spec, ChildLife(policy), state_dir.log_of(spec.name)) for spec in specs
        ]
        self._gates = {child.spec.name: child.ready_once for child in self._children}
        self._gates.update(gates or {})
        self._cwd, self._environment, self._spawner = state_dir.path, environment, spawner
        self._on_change, self._loading_progress = on_change, loading_progress
        self._tasks: list[asyncio.Task[None]] = []
        self._bounds_task: asyncio.Task[None] | None = None
        self.failed = asyncio.Event()
        self.failure = ""

    def views(self) -> list[ChildView]:
        """Describe every child as it is now."""
        return [child.view() for child in self._children]

    def start(self) -> None:
        """Begin; returns at once."""
        self._tasks = [asyncio.create_task(self._keep(child)) for child in self._children]
        self._bounds_task = asyncio.create_task(self._keep_bounds())

    async def wait_ready(self) -> None:
        """Wait until every child has been ready once. Returns too when the fleet has failed."""
        everything = asyncio.create_task(self._all_ready())
        failed = asyncio.create_task(self.failed.wait())
        try:
            await asyncio.wait([everything, failed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(everything, failed)

    async def stop(self) -> None:
        """Stop the children stage by stage; afterwards none of them runs."""
        for child in self._children:  # nobody waits for a process that will not come
            child.let_go()
        for child in self._children:  # who does not run now will not be started
            if child.process is None:
                self._ask_to_stop(child)
        kept = list(zip(self._children, self._tasks, strict=True))
        for stage in sorted({child.spec.stop_stage for child in self._children}):
            members = [(child, task) for child, task in kept if child.spec.stop_stage == stage]
            await asyncio.gather(*(self._stop_child(child) for child, _ in members))
            await asyncio.gather(*(task for _, task in members))
        await cancel_and_wait(self._bounds_task)

    async def _all_ready(self) -> None:
        for child in self._children:
            await child.ready_once.wait()

    async def _stop_child(self, child: _Child) -> None:
        self._ask_to_stop(child)
        grace_s = child.spec.stop_grace_s
        stops = [it.process.see_off(grace_s) for it in child.leaving]
        if child.process is not None:
            stops.append(child.process.process.stop(grace_s))
        if not all(await asyncio.gather(*stops)):
            child.detail = f"killed after {grace_s:.0f} s"
            self._on_change()

    def _ask_to_stop(self, child: _Child) -> None:
        child.life.stop()
        child.stopping.set()
        self._on_change()

    async def _keep(self, child: _Child) -> None:
        for name in child.spec.needs:
            await _first_of(self._gates[name], child.stopping)
        while not child.stopping.is_set():
            if (delay_s := await self._run_once(child)) is None:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await child.stopping.wait()

    async def _run_once(self, child: _Child) -> float | None:
        """Run a process until the next is due; return the pause before, None = there is none."""
        try:
            running = child.process = await self._spawn(child)
        except StartError as error:
            self._fail(child, child.life.start_failed(str(error)))
            return None
        child.life.spawned(running.process.pid)
        self._on_change()
        watch = asyncio.create_task(self._watch(child))
        if child.stopping.is_set():  # asked for while the process was being made
            running.let_go()
            await running.process.stop(child.spec.stop_grace_s)
        ending = asyncio.create_task(running.process.wait())
        is_leaving = await _is_leaving(running, ending)
        await cancel_and_wait(watch)
        child.process, child.progress_ratio = None, None
        if is_leaving and not child.stopping.is_set():
            self._see_off(child, running, ending)
            return 0.0
        code = await ending
        running.close()
        return self._after_exit(child, code)

    def _see_off(self, child: _Child, leaving: _Process, ending: asyncio.Task[int]) -> None:
        """Make room for the next process, beside one that somebody has told to stop."""

        def end(_: object) -> None:
            child.leaving.remove(leaving)
            leaving.close()

        child.leaving.append(leaving)
        ending.add_done_callback(end)
        child.life.left()
        _log.info("%s was told to stop, its successor starts", child.spec.name)
        self._on_change()

    async def _spawn(self, child: _Child) -> _Process:
        spec, environment, descriptors = child.spec, self._environment_of(child.spec), list[int]()
        succession = None
        if spec.listen_fd_setting:
            descriptors.append(child.listening())
            environment[spec.listen_fd_setting] = str(descriptors[-1])
        if spec.succession_fd_setting:
            succession = Succession()
            descriptors.append(succession.descriptor)
            environment[spec.succession_fd_setting] = str(descriptors[-1])
        try:
            process = await self._spawner.start(
                spec.argv, environment, child.log, self._cwd, descriptors
            )
        except BaseException:
            if succession is not None:
                succession.close()
            raise
        if succession is not None:
            succession.is_inherited()
        return _Process(process, succession)

    def _after_exit(self, child: _Child, code: int) -> float | None:
        action = child.life.exited(code, time.monotonic())
        child.detail = "" if isinstance(action, Gone) else describe_exit(code)
        if isinstance(action, GiveUp):
            self._fail(child, action)
            return None
        self._on_change()
        if isinstance(action, Gone):
            return None
        _log.warning("%s ended (%s), starts again", child.spec.name, child.detail)
        return action.delay_s

    def _environment_of(self, spec: ChildSpec) -> dict[str, str]:
        return {**spec.defaults, **self._environment, **spec.environment}

    async def _watch(self, child: _Child) -> None:
        """Probe one life of a child; end the fleet if it does not get ready in time."""
        probe, started_s = child.probe(), time.monotonic()
        while True:
            ready = await probes.is_ready(probe)
            await self._note(child, ready)
            is_starting = child.life.state is ChildState.STARTING
            if is_starting and time.monotonic() - started_s > child.spec.start_timeout_s:
                seconds = f"{child.spec.start_timeout_s:.0f} s"
                self._fail(child, child.life.start_failed(f"was not ready within {seconds}"))
                return
            await asyncio.sleep(_STARTING_POLL_S if not ready else _RUNNING_POLL_S)

    async def _note(self, child: _Child, ready: bool) -> None:
        changed = child.life.probed(ready)
        if ready:
            child.ready_once.set()
            for former in child.leaving:
                former.let_go()
            child.detail, progress = "", None
        else:
            progress = await self._ask_progress(child)
        if changed or progress != child.progress_ratio:
            child.progress_ratio = progress
            self._on_change()

    async def _ask_progress(self, child: _Child) -> float | None:
        if self._loading_progress is None or child.life.state is not ChildState.STARTING:
            return None
        if not child.spec.shows_loading:
            return None
        return await self._loading_progress(child.spec.address)

    def _fail(self, child: _Child, action: GiveUp) -> None:
        child.detail = action.reason
        if not self.failure:
            tail = "".join(f"\n  | {line}" for line in last_lines(child.log))
            end = f". The end of its log ({child.log}):{tail}" if tail else f", see {child.log}"
            self.failure = f"{child.spec.name} {action.reason}{end}"
            self.failed.set()
        self._on_change()

    async def _keep_bounds(self) -> None:
        while True:
            await asyncio.sleep(_BOUNDS_CHECK_S)
            for child in self._children:
                with contextlib.suppress(OSError):
                    cut_if_long(child.log)
                child.bound_memory()


async def _is_leaving(running: _Process, ending: asyncio.Task[int]) -> bool:
    """Wait until a process ends, or says that it was told to stop (True)."""
    if running.succession is None:
        await asyncio.wait({ending})
        return False
    telling = asyncio.create_task(running.succession.until_leaving())
    await asyncio.wait({ending, telling}, return_when=asyncio.FIRST_COMPLETED)
    is_leaving = telling.done() and telling.result()
    await cancel_and_wait(telling)
    if not is_leaving:
        await asyncio.wait({ending})
    return is_leaving


async def _first_of(*events: asyncio.Event) -> None:
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait(*tasks)
