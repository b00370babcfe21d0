"""``headrace down`` and ``status``: what needs no more than the state directory, and is quick."""

from __future__ import annotations

import json
import signal
from argparse import Namespace
from typing import Any

import psutil

from headrace_launcher.exit_codes import EXIT_FAILED, EXIT_NOT_RUNNING, EXIT_OK
from headrace_launcher.fleet_view import FleetState, FleetView, public_status, scrape_targets
from headrace_launcher.settings import LauncherSettings
from headrace_launcher.state_dir import StateDir, is_running, supervisor_of
from headrace_launcher.text import say, status_text


def down(settings: LauncherSettings, args: Namespace) -> int:
    """Stop the fleet of a state directory and wait until nothing of it runs."""
    state_dir = StateDir(settings.state_dir)
    try:
        view = state_dir.read_view()
    except ValueError as error:
        say(f"cannot tell which fleet to stop: {state_dir.fleet_json}: {error}")
        return EXIT_FAILED
    process = supervisor_of(view) if view is not None else None
    if view is None or process is None:
        say(f"no fleet runs with state directory {state_dir.path}")
        return EXIT_OK
    print(f"stopping the fleet of process {view.pid} ...", flush=True)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(args.timeout_s)
    except psutil.TimeoutExpired:
        say(f"process {view.pid} has not ended within {args.timeout_s:.0f} s; it is still draining")
        return EXIT_FAILED
    last = _read(settings)
    if last is not None and last.state is FleetState.FAILED:
        say(last.message)
    print("stopped; nothing is left running", flush=True)
    return EXIT_OK


def status(settings: LauncherSettings, args: Namespace) -> int:
    """Show every part of the fleet; exit code 3 if none runs."""
    view, state_dir = _read(settings), StateDir(settings.state_dir)
    alive = view is not None and is_running(view)
    if args.prometheus:
        print(json.dumps(scrape_targets(view) if view and alive else [], indent=2))
    elif args.json:
        empty: dict[str, Any] = {"state": "stopped", "pid": None, "services": [], "workers": []}
        print(json.dumps(public_status(view, alive=alive) if view else empty, indent=2))
    elif view is None or not alive:
        say(f"no fleet runs with state directory {state_dir.path}")
        if view is not None and view.message:
            say(f"the last one ended: {view.message}")
    else:
        print(f"{view.state.value}: {view.base_url}/v1, model {view.model}, process {view.pid}")
        print(f"state and logs: {view.state_dir}\n")
        print(status_text(view))
    return EXIT_OK if alive else EXIT_NOT_RUNNING


def _read(settings: LauncherSettings) -> FleetView | None:
    try:
        return StateDir(settings.state_dir).read_view()
    except ValueError as error:
        say(f"{StateDir(settings.state_dir).fleet_json}: {error}")
        return None
