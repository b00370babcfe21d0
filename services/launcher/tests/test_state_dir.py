"""Who owns a state directory, and what it says."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from headrace_launcher.fleet_view import (
    ChildView,
    FleetState,
    FleetView,
    Role,
    public_status,
    scrape_targets,
)
from headrace_launcher.state_dir import StateDir, StateDirBusyError, own_identity, supervisor_of


def a_view(state: FleetState = FleetState.RUNNING) -> FleetView:
    pid, created_s = own_identity()
    children = [
        ChildView("model", Role.STEP, "ready"),
        ChildView("valkey", Role.STORE, "ready", "127.0.0.1:1", "", pid=11),
        ChildView("billing", Role.SERVICE, "ready", "127.0.0.1:2", "127.0.0.1:3", pid=12),
        ChildView("worker-1", Role.WORKER, "starting", "127.0.0.1:4", "127.0.0.1:5", pid=13),
    ]
    return FleetView(state, pid, created_s, "http://127.0.0.1:8080", "m", "/s", children=children)


def test_is_private_to_its_owner(tmp_path: Path) -> None:
    """It holds a key and a ledger."""
    state_dir = StateDir(tmp_path / "a" / "b")
    state_dir.create()
    assert state_dir.path.stat().st_mode & 0o777 == 0o700


def test_a_second_owner_is_refused_with_the_first_ones_process(state_dir: StateDir) -> None:
    """One fleet per folder; the message says how to see and how to stop it."""
    state_dir.lock()
    with pytest.raises(StateDirBusyError, match=rf"process {os.getpid()}.*headrace down"):
        StateDir(state_dir.path).lock()
    state_dir.unlock()
    again = StateDir(state_dir.path)
    again.lock()
    again.unlock()


def test_what_was_written_is_read_again(state_dir: StateDir) -> None:
    """fleet.json keeps all fields, and no draft is left."""
    view = a_view()
    state_dir.write_view(view)
    assert state_dir.read_view() == view
    assert not list(state_dir.path.glob("*.new"))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 99}', '{"version": 1}'])
def test_a_damaged_fleet_json_is_an_error_with_words(state_dir: StateDir, text: str) -> None:
    """Never a stack trace."""
    state_dir.fleet_json.write_text(text)
    with pytest.raises(ValueError, match=r"."):
        state_dir.read_view()


def test_a_fleet_runs_while_its_supervisor_does(state_dir: StateDir) -> None:
    """The same process, not another one with its number; and not after its end."""
    assert state_dir.running_view() is None
    view = a_view()
    state_dir.write_view(view)
    assert state_dir.running_view() == view

    view.pid_created_s -= 100  # the number was given out again
    state_dir.write_view(view)
    assert state_dir.running_view() is None

    state_dir.write_view(a_view(FleetState.STOPPED))
    assert state_dir.running_view() is None


def test_a_supervisor_that_was_killed_is_not_running() -> None:
    """Not even while nobody has collected its exit code."""
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"])
    view = a_view()
    view.pid, view.pid_created_s = process.pid, psutil.Process(process.pid).create_time()
    assert supervisor_of(view) is not None
    process.kill()
    psutil.wait_procs([], timeout=0)
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    assert supervisor_of(view) is None
    process.wait()
    assert supervisor_of(view) is None


def test_status_lists_services_and_workers_apart() -> None:
    """The stable form for scripts: every service with state, address, pid; workers with id."""
    status = public_status(a_view(), alive=True)
    assert status["state"] == "running"
    assert [(s["name"], s["state"], s["address"], s["pid"]) for s in status["services"]] == [
        ("valkey", "ready", "127.0.0.1:1", 11),
        ("billing", "ready", "127.0.0.1:2", 12),
    ]
    assert status["services"][1]["metrics_address"] == "127.0.0.1:3"
    assert [(w["id"], w["address"], w["pid"]) for w in status["workers"]] == [
        ("worker-1", "127.0.0.1:4", 13)
    ]


def test_targets_carry_the_labels_that_alerts_need() -> None:
    """Gateways are one service, whatever their number; a worker's name is anybody's choice."""
    view = a_view()
    view.children += [
        ChildView("gateway-2", Role.SERVICE, "ready", "127.0.0.1:6", "127.0.0.1:7"),
        ChildView("cache-index", Role.SERVICE, "ready", "127.0.0.1:8", "127.0.0.1:9"),
        ChildView("big-70", Role.WORKER, "ready", "127.0.0.1:10", "127.0.0.1:11"),
    ]
    assert [(*it["targets"], *it["labels"].values()) for it in scrape_targets(view)] == [
        ("127.0.0.1:3", "billing", "billing"),
        ("127.0.0.1:5", "worker", "worker-1"),
        ("127.0.0.1:7", "gateway", "gateway-2"),
        ("127.0.0.1:9", "cache-index", "cache-index"),
        ("127.0.0.1:11", "worker", "big-70"),
    ]


def test_status_of_a_fleet_whose_supervisor_is_gone_claims_nothing() -> None:
    """No pids and no state of a time that is over."""
    status = public_status(a_view(), alive=False)
    assert status["state"] == "stopped"
    assert status["message"] == "its supervisor is gone"
    assert {s["state"] for s in status["services"] + status["workers"]} == {"stopped"}
    assert {s["pid"] for s in status["services"] + status["workers"]} == {None}
