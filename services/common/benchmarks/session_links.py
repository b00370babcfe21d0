"""One session over plain TCP and over gRPC, in one run: calls a second, and CPU per call.

    python services/common/benchmarks/session_links.py [--seconds 3] [--in-flight 1 16 64]

A server process answers the guard's `CheckInput`; this process calls it, 16 in flight, by each link
in turn, several times over. CPU is this process's, all threads: what a gateway pays per call.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time

import uvloop

from headrace_common.rpc import Call, method_ref
from headrace_common.rpc_server import RpcServer
from headrace_common.session import SessionClient
from headrace_contracts.guard.v1 import guard_pb2 as pb
from headrace_testing.fake_guard import DESCRIPTOR, FakeGuard

_CHECK = method_ref(DESCRIPTOR, "CheckInput", pb.CheckInputRequest, pb.CheckInputResponse)
_REQUEST = pb.CheckInputRequest(
    request_id="req_01", tenant_id="t", parts=[pb.TextPart(path="p", text="water " * 40)]
)
_ROUNDS = 3


class _Guard(FakeGuard):
    """Answers at once."""

    async def CheckInput(  # noqa: N802 - contract name
        self, _request: pb.CheckInputRequest, _call: Call
    ) -> pb.CheckInputResponse:
        """Find nothing."""
        return pb.CheckInputResponse(verdict=pb.Verdict(action=pb.ACTION_ALLOW))


async def _serve() -> None:
    server = RpcServer("127.0.0.1:0", [(DESCRIPTOR, _Guard())])
    await server.start()
    print(server.port, flush=True)
    await asyncio.Event().wait()


async def _measure(address: str, in_flight: int, seconds: float) -> tuple[float, float]:
    client = SessionClient(address)
    await client.unary(_CHECK, _REQUEST, timeout_s=10)
    end_s = time.monotonic() + seconds
    num_calls = 0

    async def call() -> None:
        nonlocal num_calls
        while time.monotonic() < end_s:
            await client.unary(_CHECK, _REQUEST, timeout_s=10)
            num_calls += 1

    started_s, cpu_s = time.monotonic(), time.process_time()
    await asyncio.gather(*(call() for _ in range(in_flight)))
    cpu_us = (time.process_time() - cpu_s) / num_calls * 1e6
    rate = num_calls / (time.monotonic() - started_s)
    await client.close()
    return rate, cpu_us


async def _compare(port: int, args: argparse.Namespace) -> None:
    print("| in flight | TCP calls/s | gRPC calls/s | ratio | TCP CPU us | gRPC CPU us | ratio |")
    print("|---|---|---|---|---|---|---|")
    for in_flight in args.in_flight:
        best: dict[str, tuple[float, float]] = {}
        for _ in range(_ROUNDS):
            for link in ("", "grpc://"):
                rate, cpu_us = await _measure(
                    f"{link}127.0.0.1:{port}", in_flight, args.seconds / _ROUNDS
                )
                before = best.get(link, (0.0, 1e9))
                best[link] = max(before[0], rate), min(before[1], cpu_us)
        tcp, grpc = best[""], best["grpc://"]
        print(
            f"| {in_flight} | {tcp[0]:.0f} | {grpc[0]:.0f} | {tcp[0] / grpc[0]:.2f}x "
            f"| {tcp[1]:.0f} | {grpc[1]:.0f} | {tcp[1] / grpc[1]:.2f}x |",
            flush=True,
        )


def main() -> None:
    """Start the server, compare, end it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each link and load")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        uvloop.run(_serve())
        return
    with subprocess.Popen(
        [sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            uvloop.run(_compare(int(server.stdout.readline()), args))
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
