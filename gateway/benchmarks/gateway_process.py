"""Our gateway as it is served, with parts left out by ``--without``: for measuring their share.

    python gateway_process.py --fleet fleet.json --port 8080 --without guard,admission,outbox

A part that is left out is replaced by one that says yes at once, in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

from headrace_common.errors import ReplicaLost
from headrace_common.lifecycle import Lifecycle, run
from headrace_common.telemetry import Telemetry, TelemetrySettings
from headrace_contracts.guard.v1 import guard_pb2
from headrace_contracts.ratelimit.v1 import ratelimit_pb2
from headrace_contracts.usage.v1.usage_pb2 import UsageEvent
from headrace_gateway import app
from headrace_gateway.app import Gateway
from headrace_gateway.settings import GatewaySettings

PARTS = ("guard", "admission", "outbox")


class _Answered:
    """A call whose answer is there."""

    def __init__(self, answer: guard_pb2.CheckInputResponse) -> None:
        self._answer, self.first_answer_s = answer, None

    async def receive(self) -> guard_pb2.CheckInputResponse:
        """Return it."""
        return self._answer

    def cancel(self) -> None:
        """Nothing to end."""


class NoGuard:
    """Lets everything pass; its keys are fail-open."""

    # There is none.
    connection = None

    def __init__(self, _address: str, _timeout_s: float, _wait_s: float) -> None:
        verdict = guard_pb2.Verdict(action=guard_pb2.ACTION_ALLOW)
        self._clean = guard_pb2.CheckInputResponse(verdict=verdict)

    async def start_input_check(self, _request: object) -> _Answered:
        """Allow."""
        return _Answered(self._clean)

    async def open_output(self, _opened: object, *, waits: bool = False) -> object:
        """Say that there is none: text goes out unguarded."""
        raise ReplicaLost("no guard")

    async def report_sent(self, _report: object) -> None:
        """Nobody to tell."""

    async def close(self) -> None:
        """Nothing to end."""


class NoLimiter:
    """Admits everything."""

    def __init__(self, _address: str, _timeout_s: float) -> None:
        self._admitted = ratelimit_pb2.AdmitResponse(
            outcome=ratelimit_pb2.AdmitResponse.OUTCOME_ADMITTED
        )

    async def admit(self, _request: object) -> ratelimit_pb2.AdmitResponse:
        """Admit."""
        return self._admitted

    async def settle(self, _request: object) -> ratelimit_pb2.SettleResponse:
        """Take note of nothing."""
        return ratelimit_pb2.SettleResponse(settled=True)

    def settle_soon(self, _request: object) -> asyncio.Future[ratelimit_pb2.LimitAnswer]:
        """Take note of nothing, at once."""
        settled: asyncio.Future[ratelimit_pb2.LimitAnswer] = (
            asyncio.get_running_loop().create_future()
        )
        settled.set_result(ratelimit_pb2.LimitAnswer())
        return settled

    async def renew(self, _request: object) -> ratelimit_pb2.RenewResponse:
        """Keep nothing alive."""
        return ratelimit_pb2.RenewResponse()

    async def close(self) -> None:
        """Nothing to end."""


class NoLog:
    """Forgets usage."""

    is_full = False

    async def start(self) -> None:
        """Nothing to take over."""

    async def close(self) -> None:
        """Nothing to write."""

    def opened(self, event: UsageEvent) -> asyncio.Future[None]:
        """Forget it."""
        return self.closed(event)

    async def until_recorded(self, recorded: asyncio.Future[None]) -> None:
        """It is forgotten already."""

    def closed(self, event: UsageEvent) -> asyncio.Future[None]:
        """Forget it."""
        forgotten: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        forgotten.set_result(None)
        return forgotten


async def _serve(settings: GatewaySettings, without: set[str]) -> None:
    lifecycle = Lifecycle()
    lifecycle.install_signals()
    if "guard" in without:
        app.GuardClient = NoGuard  # type: ignore[misc,assignment]
    if "admission" in without:
        app.RateLimitClient = NoLimiter  # type: ignore[misc,assignment]
    await Gateway(settings, lifecycle, usage_log=NoLog() if "outbox" in without else None).run()


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleet", type=Path, required=True, help="what instant_fleet.py printed")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kafka", default="127.0.0.1:9", help="host:port of a broker")
    parser.add_argument("--without", default="", help=f"comma-separated: {', '.join(PARTS)}")
    args = parser.parse_args()
    without = set(filter(None, args.without.split(",")))
    if not without <= set(PARTS):
        sys.exit(f"--without knows {', '.join(PARTS)}")
    where = json.loads(args.fleet.read_text())
    telemetry = Telemetry("gateway", TelemetrySettings(log_level="ERROR", trace_dir=None))
    with tempfile.TemporaryDirectory() as folder:
        settings = GatewaySettings(
            listen=f"127.0.0.1:{args.port}",
            metrics_listen="127.0.0.1:0",
            router_address=where["fleet"],
            guard_address=where["fleet"],
            ratelimit_address=where["fleet"],
            billing_address=where["billing"],
            kafka_bootstrap=args.kafka,
            outbox_dir=Path(folder),
            drain_grace_s=1.0,
        )
        run(_serve(settings, without))
    telemetry.shutdown()


if __name__ == "__main__":
    main()
