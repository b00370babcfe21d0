"""``headrace up``: checks, then a fleet in the foreground or in the background."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from argparse import Namespace

import psutil

from headrace_common.lifecycle import Lifecycle, cancel_and_wait
from headrace_launcher.display import make_display
from headrace_launcher.exit_codes import EXIT_FAILED, EXIT_OK
from headrace_launcher.first_key import FirstKey
from headrace_launcher.fleet import Fleet, FleetError, first_key_of, run_until_done
from headrace_launcher.fleet_view import FleetState, FleetView
from headrace_launcher.log_file import last_lines, rotate
from headrace_launcher.peer import PeerError
from headrace_launcher.preflight import (
    Endpoint,
    PreflightError,
    check_file,
    check_model_routes,
    check_port,
    check_reachable,
    check_state_dir,
)
from headrace_launcher.settings import LauncherSettings
from headrace_launcher.state_dir import StateDir, StateDirBusyError
from headrace_launcher.text import say
from headrace_launcher.welcome import program, welcome

_POLL_S = 0.1
_OWNER_POLL_S = 0.5


def up(settings: LauncherSettings, args: Namespace) -> int:
    """Start a fleet, in the foreground or (``--detach``) in a process of its own."""
    state_dir = StateDir(settings.state_dir)
    try:
        _check(settings, state_dir)
        if args.detach:
            state_dir.unlock()
            return _Detached(state_dir, args.own_arguments).start()
        return run_until_done(_run_here(settings, state_dir, is_background=args.background))
    except (PreflightError, StateDirBusyError) as error:
        say(str(error))
        return EXIT_FAILED
    finally:
        state_dir.unlock()


def _check(settings: LauncherSettings, state_dir: StateDir) -> None:
    check_state_dir(state_dir)
    state_dir.lock()
    check_model_routes(settings.model_routes_file)
    check_file(settings.upstreams_file, "--upstreams")
    for n in range(settings.gateways):
        check_port(Endpoint(settings.host, settings.port + n))
    if settings.redis_url:
        check_reachable(settings.redis_url, "Redis", "HEADRACE_LAUNCHER_REDIS_URL")
    if settings.kafka_bootstrap:
        check_reachable(settings.kafka_bootstrap, "Kafka", "HEADRACE_LAUNCHER_KAFKA_BOOTSTRAP")


async def _run_here(settings: LauncherSettings, state_dir: StateDir, *, is_background: bool) -> int:
    lifecycle = Lifecycle()
    lifecycle.install_signals()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lifecycle.stopping.set)
    display = make_display(sys.stdout)

    def on_running(view: FleetView, key: FirstKey) -> None:
        display.close()
        # The log of a background fleet is no place for a key; its starter prints it.
        text = "running" if is_background else welcome(view, key, program(), detached=False)
        print(text, flush=True)

    owner = asyncio.create_task(_follow(settings.owner_pid, lifecycle.stopping))
    try:
        await Fleet(settings, state_dir, display).run(lifecycle.stopping, on_running)
    except FleetError as error:
        display.close()
        say(str(error))
        return EXIT_FAILED
    finally:
        await cancel_and_wait(owner)
    display.close()
    print("Headrace has stopped; nothing is left running.", flush=True)
    return EXIT_OK


async def _follow(owner_pid: int, stopping: asyncio.Event) -> None:
    """Stop the fleet once the process that it belongs to is gone."""
    while owner_pid and psutil.pid_exists(owner_pid):  # noqa: ASYNC110 - nothing tells us
        await asyncio.sleep(_OWNER_POLL_S)
    if owner_pid:
        stopping.set()


class _Detached:
    """Starts a supervisor in a session of its own; watches until the fleet runs or has failed."""

    def __init__(self, state_dir: StateDir, arguments: list[str]) -> None:
        self._state_dir, self._arguments = state_dir, arguments
        self._log = state_dir.log_of("supervisor")

    def start(self) -> int:
        rotate(self._log)
        with self._log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "headrace_launcher", *self._arguments, "--background"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            return self._watch(process)
        except KeyboardInterrupt:
            say("stopping the fleet that was being started")
            process.terminate()
            process.wait()
            return EXIT_FAILED

    def _watch(self, process: subprocess.Popen[bytes]) -> int:
        display = make_display(sys.stdout)
        view = None
        try:
            while process.poll() is None:
                view = self._view_of(process.pid)
                if view is not None:
                    display.update(view)
                    if view.state is FleetState.RUNNING:
                        break
                time.sleep(_POLL_S)
        finally:
            display.close()
        if view is None or view.state is not FleetState.RUNNING or process.poll() is not None:
            tail = last_lines(self._log, 20)
            say("\n".join(["the fleet did not start", *tail, f"(whole log: {self._log})"]))
            return EXIT_FAILED
        try:
            key = asyncio.run(first_key_of(view, self._state_dir))
        except (PeerError, OSError) as error:
            say(f"the fleet runs, but its first key cannot be shown: {error}")
            return EXIT_OK
        print(welcome(view, key, program(), detached=True), flush=True)
        return EXIT_OK

    def _view_of(self, pid: int) -> FleetView | None:
        try:
            view = self._state_dir.read_view()
        except ValueError:
            return None
        return view if view is not None and view.pid == pid else None
