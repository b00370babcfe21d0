"""Runs the gateway."""

from __future__ import annotations

import asyncio
import signal

from headrace_common.lifecycle import Lifecycle
from headrace_common.service_process import run_service, take_no_arguments
from headrace_gateway.app import Gateway
from headrace_gateway.outbox_place import OutboxInUseError
from headrace_gateway.settings import GatewaySettings


async def _serve(settings: GatewaySettings) -> None:
    lifecycle = Lifecycle()
    lifecycle.install_signals()
    gateway = Gateway(settings, lifecycle)
    # As daemons do: read the file of model routes again, now.
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, gateway.routes.wake)
    await gateway.run()


def main() -> None:
    """Load settings, start telemetry, serve until SIGTERM or SIGINT."""
    take_no_arguments("gateway", GatewaySettings)
    failures = (ValueError, OutboxInUseError)
    run_service("gateway", GatewaySettings.load_or_exit(), _serve, failures=failures)


if __name__ == "__main__":
    main()
