"""The shared bench harness (mock upstream and load generator in C), read in place, and /proc.

Nothing is written to the harness's folder: what is compiled and the bodies lie in a folder of ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOCK_PORT = 9100
PATH = "/v1/chat/completions"
_SYSTEM = "You are a helpful assistant that answers shortly and precisely. " * 3
_QUESTION = "Tell me in two sentences how a gateway for language models works."


class HarnessMissingError(Exception):
    """The harness, or what it needs, is not here."""


@dataclass(frozen=True)
class Target:
    """A gateway under load: where it is, its key, and how its upstream counts departures."""

    name: str
    port: int
    key: str
    stats_port: int
    headers: tuple[str, ...] = ()

    @property
    def header_args(self) -> list[str]:
        """Headers as the load generator takes them."""
        return [f"Authorization: Bearer {self.key}", *self.headers]


class Harness:
    """Compiled tools, bodies, and the cores that things run on."""

    def __init__(self, source: Path, folder: Path, driver_cpu: int) -> None:
        self._folder, self._cpu = folder, driver_cpu
        for name in ("loadgen", "mock"):
            if not (source / f"{name}.c").exists():
                raise HarnessMissingError(f"there is no {name}.c in {source}")
            command = ["gcc", "-O2", "-w", "-o", str(folder / name), str(source / f"{name}.c")]
            try:
                subprocess.run(command, check=True)
            except FileNotFoundError as error:
                raise HarnessMissingError("there is no gcc") from error
        for name, body in _bodies().items():
            (folder / f"{name}.json").write_text(json.dumps(body))

    def start_mock(self) -> subprocess.Popen[bytes]:
        """Start the peers' upstream; it listens where their launch lines look."""
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", MOCK_PORT)) == 0:
                raise HarnessMissingError(f"port {MOCK_PORT} is taken; the mock needs it")
        mock = subprocess.Popen(self.pinned([str(self._folder / "mock"), str(MOCK_PORT)]))
        wait_port(MOCK_PORT, 5)
        return mock

    def pinned(self, command: list[str], cpu: int | None = None) -> list[str]:
        """Pin a command to a core, by default the driver's."""
        return ["taskset", "-c", str(self._cpu if cpu is None else cpu), *command]

    def load(
        self, port: int, conc: int, seconds: float, body: str, headers: list[str]
    ) -> dict[str, Any]:  # Any: numbers and the first error
        """Run the load generator once."""
        command = [str(self._folder / "loadgen"), "127.0.0.1", str(port), PATH, str(conc)]
        command += [str(seconds), str(self._folder / f"{body}.json"), *headers]
        done = subprocess.run(self.pinned(command), capture_output=True, text=True, check=True)
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def body(self, name: str) -> bytes:
        """Return a request's body."""
        return (self._folder / f"{name}.json").read_bytes()


def _bodies() -> dict[str, dict[str, Any]]:  # Any: JSON
    def body(model: str, words: str, *, stream: bool) -> dict[str, Any]:
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": words}]
        fields = {"model": model, "messages": messages, "max_tokens": 64, "temperature": 0.7}
        if stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return fields

    return {
        "whole": body("mock-fast", _QUESTION, stream=False),
        "burst": body("mock-fast", f"burst: {_QUESTION}", stream=True),
        "paced": body("mock-fast", f"paced: {_QUESTION}", stream=True),
        "slow": body("mock-fast", f"slowfirst: {_QUESTION}", stream=True),
    }


def pids_of(port: int) -> set[int]:
    """Return the processes that listen on a port, with their descendants."""
    shown = subprocess.run(
        ["ss", "-ltnp", f"sport = :{port}"], capture_output=True, text=True, check=True
    ).stdout
    found = {int(pid) for pid in re.findall(r"pid=(\d+)", shown)}
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    todo = list(found)
    while todo:
        for child in children.get(todo.pop(), []):
            if child not in found:
                found.add(child)
                todo.append(child)
    return found


def cpu_s(pids: set[int]) -> float:
    """Return the CPU time of processes so far, all threads."""
    total_ns = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                total_ns += int((task / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def rss_mb(pids: set[int]) -> float:
    """Return the resident memory of processes."""
    total_kb = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            total_kb += int(re.search(r"VmRSS:\s+(\d+)", status)[1])  # type: ignore[index]
    return total_kb / 1024


def stats(port: int) -> dict[str, int]:
    """Ask an upstream what became of its streams."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/stats", timeout=5) as answer:
        counts: dict[str, int] = json.load(answer)
        return counts


def open_request(target: Target, body: bytes) -> socket.socket:
    """Send one request and leave its connection open."""
    head = [f"POST {PATH} HTTP/1.1", "Host: bench", "Content-Type: application/json"]
    head += [*target.header_args, f"Content-Length: {len(body)}"]
    connection = socket.create_connection(("127.0.0.1", target.port), timeout=3)
    connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + body)
    return connection


def wait_port(port: int, within_s: float) -> None:
    """Return once somebody listens.

    Raises:
        TimeoutError: nobody did.
    """
    end_s = time.monotonic() + within_s
    while time.monotonic() < end_s:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"nobody listens on {port}")


@contextlib.contextmanager
def ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:  # Any: str or bytes
    """End a process, and its group if it leads one, when the block is over."""
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(process.pid) == process.pid:
                    os.killpg(process.pid, number)
                else:
                    process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
                break
