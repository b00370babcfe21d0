"""A servicer that does what each call asks of it, and a server and client with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from headrace_common.errors import RateLimited, Unimplemented, from_reason
from headrace_common.rpc import Call, method_ref
from headrace_common.rpc_server import RpcServer
from headrace_common.session import SessionClient
from headrace_contracts.guard.v1 import guard_pb2
from headrace_contracts.guard.v1.guard_pb2 import (
    CheckInputRequest,
    CheckInputResponse,
    CheckOutputRequest,
    CheckOutputResponse,
)

GUARD = guard_pb2.DESCRIPTOR.services_by_name["Guard"]
UNARY = method_ref(GUARD, "CheckInput", CheckInputRequest, CheckInputResponse)
BIDI = method_ref(GUARD, "CheckOutput", CheckOutputRequest, CheckOutputResponse)


class EchoGuard:
    """Answers by what the request id says, so that each test can choose."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.produced = 0
        self.gate = asyncio.Event()

    async def CheckInput(  # noqa: N802 - contract name
        self, request: CheckInputRequest, call: Call
    ) -> CheckInputResponse:
        what, _, rest = request.request_id.partition(":")
        match what:
            case "error":
                raise from_reason(
                    rest, "said so", param="p", retry_after_s=1.5, metadata={"limit": "rpm"}
                )
            case "crash":
                raise ValueError("a secret from inside")
            case "cancelled":
                shared: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                shared.cancel()
                await shared
            case "hang":
                try:
                    await asyncio.sleep(60)
                finally:
                    self.cancelled += 1
            case "wait":
                await self.gate.wait()
            case "left":
                rest = f"{call.time_left_s():.1f}"
        return CheckInputResponse(verdict=guard_pb2.Verdict(reason=rest))

    async def CheckOutput(  # noqa: N802 - contract name
        self, requests: AsyncIterator[CheckOutputRequest], call: Call
    ) -> AsyncIterator[CheckOutputResponse]:
        try:
            async for request in requests:
                if request.text.text == "wait":
                    await self.gate.wait()
                if request.text.text == "fail":
                    raise RateLimited("in the middle", retry_after_s=2)
                for _ in range(max(1, request.text.choice_idx)):
                    self.produced += 1
                    yield CheckOutputResponse(released=request.text.text)
        finally:
            self.cancelled += 1


async def _not_here(self: EchoGuard, request: object, call: Call) -> None:
    raise Unimplemented("not here")


# The echo needs two of the contract's methods; the others are there, as a server has to have all.
for _method in GUARD.methods:
    if not hasattr(EchoGuard, _method.name):
        setattr(EchoGuard, _method.name, _not_here)


class EchoPeer:
    """A server, its servicer, and a client with a session to it."""

    def __init__(self, server: RpcServer, guard: EchoGuard, client: SessionClient) -> None:
        self.server, self.guard, self.client = server, guard, client
        self.address = f"127.0.0.1:{server.port}"


def ask(text: str) -> CheckInputRequest:
    """Return a request that says what is to come of it, such as "echo:x"."""
    return CheckInputRequest(request_id=text)


def say(text: str, repeat: int = 1) -> CheckOutputRequest:
    """Return a message that is answered so many times with its text."""
    return CheckOutputRequest(text=guard_pb2.OutputText(text=text, choice_idx=repeat))


async def by_session(
    peer: EchoPeer, request: CheckInputRequest, timeout_s: float = 5
) -> CheckInputResponse:
    """Make one call by the peer's own client."""
    return await peer.client.unary(UNARY, request, timeout_s=timeout_s)
