"""The gateway as a process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from headrace_testing.postgres import LocalPostgres
from headrace_testing.waiting import eventually_sync, free_port


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    port, metrics_port, nothing = free_port(), free_port(), f"127.0.0.1:{free_port()}"
    return {
        **os.environ,
        "HEADRACE_GATEWAY_LISTEN": f"127.0.0.1:{port}",
        "HEADRACE_GATEWAY_METRICS_LISTEN": f"127.0.0.1:{metrics_port}",
        "HEADRACE_GATEWAY_ROUTER_ADDRESS": nothing,
        "HEADRACE_GATEWAY_GUARD_ADDRESS": nothing,
        "HEADRACE_GATEWAY_RATELIMIT_ADDRESS": nothing,
        "HEADRACE_GATEWAY_BILLING_ADDRESS": nothing,
        "HEADRACE_GATEWAY_KAFKA_BOOTSTRAP": nothing,
        "HEADRACE_GATEWAY_OUTBOX_DIR": str(tmp_path / "outbox"),
    }


@pytest.fixture
def process(environment: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (tmp_path / "log").open("wb") as log:
        started = subprocess.Popen(
            [sys.executable, "-m", "headrace_gateway"], env=environment, stderr=log
        )
    yield started
    if started.poll() is None:
        started.kill()
    started.wait()


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    """What a test that fails leaves is ended."""
    with contextlib.ExitStack() as ends:
        yield ends


def is_healthy(address: str) -> bool:
    try:
        return httpx.get(f"http://{address}/health", timeout=1).status_code == 200
    except httpx.TransportError:
        return False


def test_a_database_of_another_encoding_stops_the_start(
    environment: dict[str, str], postgres_server: LocalPostgres
) -> None:
    """It could never keep a response; the reason is the last line of standard error."""
    url = postgres_server.create_database(encoding="SQL_ASCII")
    environment["HEADRACE_GATEWAY_STATE_URL"] = url
    ended = subprocess.run(
        [sys.executable, "-m", "headrace_gateway"],
        env=environment,
        capture_output=True,
        timeout=120,
        check=False,
    )
    postgres_server.drop_database(url)
    assert ended.returncode == 2
    assert b"encoded in SQL_ASCII and must be in UTF8" in ended.stderr.splitlines()[-1]


def test_starts_without_its_dependencies_and_leaves_on_sigterm(
    process: subprocess.Popen[bytes], environment: dict[str, str], tmp_path: Path
) -> None:
    """Nothing is up: it lives, says not ready, and exits 0 when told to."""
    public = environment["HEADRACE_GATEWAY_LISTEN"]
    eventually_sync(lambda: is_healthy(public), within_s=100)
    assert httpx.get(f"http://{public}/ready").status_code == 503
    metrics = environment["HEADRACE_GATEWAY_METRICS_LISTEN"]
    assert httpx.get(f"http://{metrics}/ready").status_code == 503
    assert "headrace_gateway_running_requests" in httpx.get(f"http://{metrics}/metrics").text
    refused = httpx.get(f"http://{public}/v1/models", headers={"Authorization": "Bearer sk-hr-x"})
    assert refused.status_code == 503
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    assert "sk-hr-x" not in log


def test_a_killed_gateway_refuses_nobody_who_comes_on_a_socket_that_it_inherits(
    environment: dict[str, str], stack: contextlib.ExitStack
) -> None:
    """Who connects while no process is there is answered by the next one."""
    del environment["HEADRACE_GATEWAY_LISTEN"]
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        host, port = held.getsockname()
        environment["HEADRACE_GATEWAY_LISTEN_FD"] = str(held.fileno())

        def start() -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "headrace_gateway"]
            process = subprocess.Popen(command, env=environment, pass_fds=[held.fileno()])
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        first = start()
        eventually_sync(lambda: is_healthy(f"{host}:{port}"), within_s=100)
        first.kill()
        first.wait()
        with socket.create_connection((host, port), timeout=100) as client:
            client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            second = start()
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        second.terminate()
        assert second.wait(timeout=60) == 0


def test_a_gateway_that_hands_over_answers_until_its_successor_serves(
    environment: dict[str, str],
) -> None:
    """Told to stop, it gives up the address of its metrics, says so, and goes on until let go."""
    ours, theirs = socket.socketpair()
    metrics = environment["HEADRACE_GATEWAY_METRICS_LISTEN"]
    public = environment["HEADRACE_GATEWAY_LISTEN"]
    environment["HEADRACE_GATEWAY_SUCCESSION_FD"] = str(theirs.fileno())
    command = [sys.executable, "-m", "headrace_gateway"]
    with ours, subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        eventually_sync(lambda: is_healthy(metrics), within_s=30)
        process.terminate()
        ours.settimeout(15)
        assert ours.recv(1) == b"1"
        assert not is_healthy(metrics)
        assert is_healthy(public)
        ours.close()
        assert process.wait(timeout=15) == 0
    assert not is_healthy(public)


def test_port_in_use_is_a_clear_message(environment: dict[str, str], tmp_path: Path) -> None:
    """One line that names the address, exit code 1."""
    with socket.socket() as taken:
        host, port = environment["HEADRACE_GATEWAY_LISTEN"].split(":")
        taken.bind((host, int(port)))
        taken.listen()
        ended = subprocess.run(
            [sys.executable, "-m", "headrace_gateway"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert ended.returncode == 1
    assert f"cannot listen on {host}:{port}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_unknown_setting_stops_the_start(environment: dict[str, str]) -> None:
    """A typo is told, not ignored."""
    ended = subprocess.run(
        [sys.executable, "-m", "headrace_gateway"],
        env={**environment, "HEADRACE_GATEWAY_LISTN": "x"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2
    assert "HEADRACE_GATEWAY_LISTN" in ended.stderr
