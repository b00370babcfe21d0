"""Everything that listens also does so on IPv6, as clusters without IPv4 need it."""

from __future__ import annotations

import socket

import httpx
import pytest
from prometheus_client import CollectorRegistry

from headrace_common.metrics import ObservabilityServer
from headrace_common.rpc_server import RpcServer
from headrace_common.session import SessionClient
from headrace_contracts.guard.v1.guard_pb2 import CheckInputRequest
from headrace_testing.echo_guard import GUARD, UNARY, EchoGuard


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")


@pytest.mark.parametrize("scheme", ["", "grpc://"])
async def test_sessions_and_grpc_are_served(scheme: str) -> None:
    """Both ways to talk go through one port."""
    server = RpcServer("[::1]:0", [(GUARD, EchoGuard())])
    await server.start()
    client = SessionClient(f"{scheme}[::1]:{server.port}")
    try:
        answer = await client.unary(UNARY, CheckInputRequest(request_id="echo:x"), timeout_s=5)
        assert answer.verdict.reason == "x"
    finally:
        await client.close()
        await server.stop(0)


def test_metrics_are_served() -> None:
    """Probes and scrapes come over the same network."""
    server = ObservabilityServer("::1", 0, CollectorRegistry(), lambda: True)
    try:
        assert httpx.get(f"http://[::1]:{server.port}/ready").status_code == 200
    finally:
        server.close()
