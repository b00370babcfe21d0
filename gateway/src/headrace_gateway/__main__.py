"""Runs the gateway."""

from __future__ import annotations

import asyncio
import signal
import sys

from headrace_common.lifecycle import Lifecycle, run
from headrace_common.telemetry import Telemetry, TelemetrySettings
from headrace_gateway.app import Gateway
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
    settings = GatewaySettings.load_or_exit()
    telemetry = Telemetry("gateway", TelemetrySettings.load_or_exit())
    settings.log_values()
    try:
        run(_serve(settings))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"gateway: {error}\n")
        raise SystemExit(1) from error
    finally:
        telemetry.shutdown()


if __name__ == "__main__":
    main()
