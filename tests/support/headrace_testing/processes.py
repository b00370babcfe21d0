"""A whole fleet of real processes for end-to-end tests, started by ``headrace up --detach``.

def test_it(fleet):
    key = fleet.create_key("acme", requests_per_minute=3)
    httpx.post(f"{fleet.base_url}/v1/chat/completions", headers=key.headers, json=...)
    os.kill(fleet.worker_pid("worker-1"), signal.SIGKILL)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace_testing.waiting import eventually_sync, free_port

MODEL = "smollm2-135m-instruct"
_START_TIMEOUT_S = 300
_COMMAND_TIMEOUT_S = 60
_STOP_TIMEOUT_S = 120


@dataclass(frozen=True)
class ApiKey:
    """A key made for a test."""

    api_key: str
    key_id: str

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that carry it."""
        return {"Authorization": f"Bearer {self.api_key}"}


class Fleet:
    """A fleet in a state directory of its own, and the commands of its operator.

    Args:
        state_dir: may hold an earlier fleet's things: `start` goes on with them.
        port: of the public API; 0 = a free one.
        num_workers: engine workers.
        environment: settings for the launcher and, through it, for the services.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        port: int = 0,
        num_workers: int = 2,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.state_dir, self.port = state_dir, port or free_port()
        self._num_workers, self._environment = num_workers, environment or {}
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.model = MODEL

    def start(self) -> str:
        """Start and wait until everything is ready; return what `headrace up` printed."""
        options = ("--detach", "--port", str(self.port), "--workers", str(self._num_workers))
        return self.headrace("up", *options, timeout_s=_START_TIMEOUT_S)

    def stop(self) -> None:
        """Drain and stop; fails if that takes too long."""
        self.headrace("down", timeout_s=_STOP_TIMEOUT_S)

    def headrace(self, *arguments: str, timeout_s: float = _COMMAND_TIMEOUT_S) -> str:
        """Run a command of the launcher and return its output; a failure raises with its stderr."""
        done = self.try_headrace(*arguments, timeout_s=timeout_s)
        if done.returncode != 0:
            raise AssertionError(
                f"headrace {' '.join(arguments)} ended with {done.returncode}:\n"
                f"{done.stdout}\n{done.stderr}"
            )
        return done.stdout

    def try_headrace(
        self, *arguments: str, timeout_s: float = _COMMAND_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the launcher whose failure the caller wants to see."""
        return subprocess.run(
            [
                sys.executable, "-m", "headrace_launcher", *arguments,
                "--state-dir", str(self.state_dir),
            ],
            # A fleet does not outlive the test run, even if that is killed.
            env={
                "HEADRACE_LAUNCHER_OWNER_PID": str(os.getpid()), **os.environ, **self._environment,
            },
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )  # fmt: skip

    # What an operator can ask.

    def create_key(self, tenant: str, name: str = "test", **options: object) -> ApiKey:
        """Create a key; *options* are those of ``keys create``: ``requests_per_minute=3``, ..."""
        words = [w for k, v in options.items() for w in (f"--{k.replace('_', '-')}", str(v))]
        out = self.headrace("keys", "create", "--tenant", tenant, "--name", name, *words, "--json")
        return ApiKey(**json.loads(out))

    def revoke_key(self, key: ApiKey) -> None:
        """Revoke a key."""
        self.headrace("keys", "revoke", key.key_id)

    def usage(self, key: ApiKey) -> dict[str, Any]:
        """Return ``usage --json`` of a key."""
        usage: dict[str, Any] = json.loads(self.headrace("usage", "--key", key.key_id, "--json"))
        return usage

    def closed_usage(self, key: ApiKey, count: int, within_s: float = 20.0) -> list[dict[str, Any]]:
        """Wait until *count* requests of a key are booked and over; return their records."""

        def booked() -> list[dict[str, Any]]:
            records: list[dict[str, Any]] = self.usage(key)["records"]
            closed = [record for record in records if record["status"] != "open"]
            assert len(closed) >= count, records
            return closed

        return eventually_sync(booked, within_s=within_s, every_s=0.3)

    def verify_ledger(self) -> dict[str, Any]:
        """Return ``ledger verify --json``; fails unless the books are right."""
        verdict: dict[str, Any] = json.loads(self.headrace("ledger", "verify", "--json"))
        return verdict

    # What runs.

    def status(self) -> dict[str, Any]:
        """Return ``status --json``."""
        done = self.try_headrace("status", "--json")
        status: dict[str, Any] = json.loads(done.stdout)
        return status

    def service(self, name: str) -> dict[str, Any]:
        """Return a service's part of the status."""
        found: dict[str, Any] = next(s for s in self.status()["services"] if s["name"] == name)
        return found

    def worker(self, worker_id: str) -> dict[str, Any]:
        """Return a worker's part of the status."""
        found: dict[str, Any] = next(w for w in self.status()["workers"] if w["id"] == worker_id)
        return found

    def service_pid(self, name: str) -> int:
        """Return the process id of a service that runs."""
        return eventually_sync(lambda: int(self.service(name)["pid"] or 0), within_s=20)

    def worker_pid(self, worker_id: str) -> int:
        """Return the process id of a worker that runs."""
        return eventually_sync(lambda: int(self.worker(worker_id)["pid"] or 0), within_s=20)

    def wait_ready(self, within_s: float = 60.0) -> None:
        """Wait until every service and worker is ready, e.g. after one was killed."""

        def all_ready() -> bool:
            status = self.status()
            states = {part["state"] for part in status["services"] + status["workers"]}
            assert states == {"ready"}, status
            return True

        eventually_sync(all_ready, within_s=within_s, every_s=0.3)

    def log(self, name: str) -> str:
        """Return the log of a service or worker."""
        return (self.state_dir / "logs" / f"{name}.log").read_text(errors="replace")

    def spans(self) -> list[dict[str, Any]]:
        """Return every span that the fleet has written out."""
        lines = (
            line
            for path in sorted((self.state_dir / "traces").glob("*.jsonl"))
            for line in path.read_text().splitlines()
        )
        return [json.loads(line) for line in lines]


@contextmanager
def running_fleet(
    state_dir: Path, *, num_workers: int = 2, environment: dict[str, str] | None = None
) -> Iterator[Fleet]:
    """Run a fleet of a test's own for the length of a block."""
    fleet = Fleet(state_dir, num_workers=num_workers, environment=environment)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.stop()


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> Iterator[Fleet]:
    """One fleet with two workers for the session. Who breaks something waits until it is mended."""
    del smollm2_gguf  # present, else skipped
    state_dir = tmp_path_factory.mktemp("fleet") / "state"
    with running_fleet(state_dir, environment={"HEADRACE_LAUNCHER_MAX_CRASHES": "50"}) as running:
        yield running
