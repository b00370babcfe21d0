"""Runs the gateway."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from headrace_common.lifecycle import Lifecycle
from headrace_common.service_process import CheckedFile, run_service, take_arguments
from headrace_gateway.app import Gateway
from headrace_gateway.model_routes.route_file import describe_route_file
from headrace_gateway.outbox_place import OutboxInUseError
from headrace_gateway.settings import GatewaySettings


async def _serve(settings: GatewaySettings) -> None:
    lifecycle = Lifecycle()
    lifecycle.install_signals()
    gateway = Gateway(settings, lifecycle)
    # As daemons do: read the file of model routes again, now.
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, gateway.routes.wake)
    await gateway.run()


def _check(path: Path | None) -> str:
    return "no file: no routes" if path is None else describe_route_file(path)


def main() -> None:
    """Serve until SIGTERM or SIGINT, or check a file of model routes."""
    take_arguments("gateway", GatewaySettings, CheckedFile("model_routes_file", _check))
    failures = (ValueError, OutboxInUseError)
    run_service("gateway", GatewaySettings.load_or_exit(), _serve, failures=failures)


if __name__ == "__main__":
    main()
