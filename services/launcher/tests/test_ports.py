"""Free ports and who holds the others."""

import os
import socket

import pytest

from headrace_launcher.ports import bind_error, bound_socket, free_ports, holder_of


def test_finds_different_ports_below_the_range_for_outgoing_connections() -> None:
    """A port must stay free while its service restarts."""
    ports = free_ports(30)
    assert len(set(ports)) == 30
    assert all(20_000 <= port <= 32_000 for port in ports)


def test_says_why_a_port_cannot_be_had_and_who_has_it() -> None:
    """In use means that somebody listens; this process does."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        error = bind_error("127.0.0.1", port)
        assert error is not None
        assert "in use" in str(error).lower()
        assert f"process {os.getpid()}" in holder_of(port)
    assert bind_error("127.0.0.1", port) is None


def test_an_ipv6_port_is_bound_and_looked_at_as_any_other() -> None:
    """A port that IPv4 has free may be taken there."""
    try:
        server = bound_socket("[::1]:0")
    except OSError:
        pytest.skip("this machine has no IPv6")
    with server:
        server.listen()
        port = server.getsockname()[1]
        assert "in use" in str(bind_error("::1", port)).lower()
        assert f"process {os.getpid()}" in holder_of(port)
    assert bind_error("::1", port) is None
