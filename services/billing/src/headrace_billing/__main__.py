"""Entry point of billing."""

from __future__ import annotations

import logging
from pathlib import Path

from headrace_billing.price_file import PACKAGED, load_prices
from headrace_billing.server import BillingServer
from headrace_billing.settings import BillingSettings
from headrace_common.lifecycle import Lifecycle
from headrace_common.metrics import ObservabilityServer, new_registry
from headrace_common.service_process import CheckedFile, run_service, take_arguments
from headrace_common.settings import split_address

_log = logging.getLogger(__name__)


def main() -> None:
    """Serve until told to stop, or check a price file."""
    take_arguments("billing", BillingSettings, CheckedFile("prices_file", _check))
    run_service("billing", BillingSettings.load_or_exit(), _serve, mistakes=(ValueError,))


async def _serve(settings: BillingSettings) -> None:
    lifecycle, registry = Lifecycle(), new_registry()
    lifecycle.install_signals()
    server = BillingServer(settings, registry)
    host, port = split_address(settings.metrics_listen)
    observability = ObservabilityServer(
        host, port, registry, lambda: server.is_ready and not lifecycle.stopping.is_set()
    )
    try:
        await server.start()
        _log.info(
            "listening on port %d, admin API on %d, metrics on %d",
            server.port,
            server.admin_port,
            observability.port,
        )
        await lifecycle.stopping.wait()
        await server.stop(settings.drain_grace_s)
    finally:
        observability.close()


def _check(path: Path | None) -> str:
    path = path or PACKAGED
    return f"{path}: {len(load_prices(path))} prices"


if __name__ == "__main__":
    main()
