"""Start, stop, start again: nothing is left running and nothing is forgotten."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import psutil
import pytest

from headrace_testing.api import chat
from headrace_testing.processes import ApiKey, Fleet, running_fleet
from headrace_testing.waiting import eventually_sync, free_port

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(400)]


def processes_of(fleet: Fleet) -> list[int]:
    """Every process that names this fleet's state directory or descends from one that does."""
    found = set()
    for process in psutil.process_iter(["pid", "cmdline", "environ"]):
        words = " ".join(process.info["cmdline"] or [])
        settings = " ".join((process.info["environ"] or {}).values())
        if str(fleet.state_dir) in words or str(fleet.state_dir) in settings:
            found.add(process.pid)
    return sorted(found - {os.getpid()})


def kill(pid: int) -> None:
    """Kill a process; returns once it is gone."""
    os.kill(pid, signal.SIGKILL)
    eventually_sync(lambda: not psutil.pid_exists(pid), within_s=20)


@pytest.mark.chaos
def test_a_fleet_comes_back_with_its_keys_and_its_ledger(
    tmp_path: Path, smollm2_gguf: Path
) -> None:
    """`down` leaves no process; `up` again finds the first key, other keys and the books."""
    state_dir = tmp_path / "state"
    with running_fleet(state_dir, num_workers=1) as fleet:
        first_key = ApiKey((state_dir / "first-key").read_text().strip(), "")
        assert chat(fleet, first_key, "hi", max_tokens=1).status_code == 200
        key = fleet.create_key("keeper")
        assert chat(fleet, key, "hi", max_tokens=1).status_code == 200
        fleet.closed_usage(key, 1)
        assert len(processes_of(fleet)) >= 9
    assert processes_of(fleet) == []
    with running_fleet(state_dir, num_workers=1) as again:
        assert chat(again, key, "hi", max_tokens=1).status_code == 200
        assert chat(again, first_key, "hi", max_tokens=1).status_code == 200
        again.closed_usage(key, 2)
        assert again.verify_ledger()["ok"]

        # Every child that dies comes back at the same address, and requests work again.
        for name in ("router", "guard", "ratelimit", "cache-index", "billing", "gateway", "valkey"):
            kill(again.service_pid(name))
            if name == "gateway":
                # Nobody who comes while it is away is refused, and nobody needs to try again.
                assert chat(again, key, "hi", max_tokens=1).status_code == 200
            again.wait_ready()
            eventually_sync(
                lambda: chat(again, key, "hi", max_tokens=1).status_code == 200, within_s=20
            )
        eventually_sync(lambda: again.verify_ledger()["num_open"] == 0, within_s=30, every_s=0.5)
        assert again.verify_ledger()["ok"]
        assert str(again.state_dir) in again.headrace("status")
    assert processes_of(again) == []


@pytest.mark.chaos
def test_a_killed_launcher_takes_its_children_along(tmp_path: Path, smollm2_gguf: Path) -> None:
    fleet = Fleet(tmp_path / "state", num_workers=1)
    fleet.start()
    supervisor = fleet.status()["pid"]
    os.kill(supervisor, signal.SIGKILL)
    eventually_sync(lambda: processes_of(fleet) == [], within_s=20)


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    """The message says which port and what to do; nothing is left running."""
    fleet = Fleet(tmp_path / "state", port=free_port(), num_workers=1)
    with socket.create_server(("127.0.0.1", fleet.port)):
        done = fleet.try_headrace("up", "--detach", "--port", str(fleet.port))
    assert done.returncode != 0
    assert str(fleet.port) in done.stdout + done.stderr
    assert "--port" in done.stdout + done.stderr
    assert processes_of(fleet) == []


def test_commands_without_a_fleet_say_so(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "state")
    done = fleet.try_headrace("keys", "create", "--tenant", "a", "--name", "b", "--json")
    assert done.returncode != 0
    assert "headrace up" in done.stderr
