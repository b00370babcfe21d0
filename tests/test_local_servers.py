"""The servers of tests: started means that they listen themselves."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from headrace_testing.servers import LocalServer
from headrace_testing.waiting import free_port

# Until its standard input ends.
LISTEN = """
import socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
sys.stdin.read()
"""
IN_A_CHILD = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdin=subprocess.PIPE).wait()
"""


def test_a_port_of_somebody_else_is_no_start(tmp_path: Path) -> None:
    """A server that cannot have its port ends, and whoever has it would be taken for it."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = LocalServer([sys.executable, "-c", LISTEN, str(port)], port, tmp_path)
        with pytest.raises(RuntimeError, match="in use"):
            server.start()


def test_a_child_that_listens_is_a_start(tmp_path: Path) -> None:
    """A server may be started by a script."""
    port = free_port()
    command = [sys.executable, "-c", IN_A_CHILD, LISTEN, str(port)]
    server = LocalServer(command, port, tmp_path)
    server.start()
    server.kill()
