"""A server and a client for the tests of sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from headrace_common.rpc_server import RpcServer
from headrace_common.session import SessionClient
from headrace_testing.echo_guard import GUARD, EchoGuard, EchoPeer


@pytest.fixture(params=["", "grpc://"], ids=["tcp", "grpc"])
async def peer(request: pytest.FixtureRequest) -> AsyncIterator[EchoPeer]:
    """A server and a client whose session goes over TCP, or over gRPC."""
    guard = EchoGuard()
    server = RpcServer("127.0.0.1:0", [(GUARD, guard)])
    await server.start()
    client = SessionClient(f"{request.param}127.0.0.1:{server.port}")
    yield EchoPeer(server, guard, client)
    await client.close()
    await server.stop(0)
