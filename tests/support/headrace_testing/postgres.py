"""A real PostgreSQL for tests, in a folder of its own on a free loopback port.

PostgreSQL refuses to run as root, so root runs it as `nobody`.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import psycopg

from headrace_testing.waiting import free_port

_USER = "headrace"


class PostgresMissingError(Exception):
    """The server's programs are not installed."""


class LocalPostgres:
    """One server that a test may stop and start again on the same port.

    Raises:
        PostgresMissingError: the server's programs are not installed.
    """

    def __init__(self) -> None:
        self._bin = _find_programs()
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-postgres-", dir="/tmp"))
        self.port = free_port()
        if os.geteuid() == 0:
            shutil.chown(self._folder, "nobody")
        self._data = self._folder / "data"
        self._run(
            "initdb", "-D", self._data, "-A", "trust", "-U", _USER, "--locale=C", "-E", "UTF8"
        )

    def start(self) -> None:
        """Start and wait until it takes connections."""
        # fsync off: nobody pulls the plug in a test, and it saves most of the time.
        options = f"-p {self.port} -k {self._folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        log = self._folder / "server.log"
        self._run("pg_ctl", "-D", self._data, "-l", log, "-o", options, "-w", "-t", "30", "start")

    def stop(self) -> None:
        """Cut all connections and end."""
        self._run("pg_ctl", "-D", self._data, "-m", "immediate", "-w", "stop")

    def freeze(self) -> None:
        """Stop every process of the server: connections stay, nothing answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        postmaster = (self._data / "postmaster.pid").read_text().split()[0]
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        for pid in (postmaster, *children):
            os.kill(int(pid), number)

    def remove(self) -> None:
        """Stop and delete everything."""
        if (self._data / "postmaster.pid").exists():
            self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def create_database(self, template_url: str = "", encoding: str = "UTF8") -> str:
        """Make a database, empty or a copy of an unused one; return its SQLAlchemy URL."""
        name = f"test_{secrets.token_hex(6)}"
        template = template_url.rpartition("/")[2] or "template0"
        self._admin(f'CREATE DATABASE "{name}" TEMPLATE "{template}" ENCODING \'{encoding}\'')
        return f"postgresql+psycopg://{_USER}@127.0.0.1:{self.port}/{name}"

    def drop_database(self, url: str) -> None:
        """Remove a database of `create_database`, whoever uses it."""
        self._admin(f'DROP DATABASE IF EXISTS "{url.rpartition("/")[2]}" WITH (FORCE)')

    def _admin(self, statement: str) -> None:
        address = f"host=127.0.0.1 port={self.port} user={_USER} dbname=postgres"
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute(statement.encode())

    def _run(self, program: str, *arguments: str | Path) -> None:
        command = [str(self._bin / program), *map(str, arguments)]
        if os.geteuid() == 0:
            command = ["su", "nobody", "-s", "/bin/bash", "-c", shlex.join(command)]
        done = subprocess.run(
            command,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr.decode(errors='replace')[-2000:]}")


def _find_programs() -> Path:
    folders = [*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    if (found := shutil.which("pg_ctl")) is not None:
        folders.insert(0, Path(found).parent)
    for folder in folders:
        if all((folder / name).exists() for name in ("initdb", "pg_ctl", "postgres")):
            return folder
    raise PostgresMissingError("no initdb, pg_ctl and postgres on PATH or in /usr/lib/postgresql")
