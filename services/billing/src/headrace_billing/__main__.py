"""Runs billing: ``python -m headrace_billing``, ``--check-config [FILE]`` checks a price file."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from headrace_billing.price_file import PACKAGED, PriceFileError, load_prices
from headrace_billing.server import BillingServer
from headrace_billing.settings import BillingSettings
from headrace_common.lifecycle import Lifecycle
from headrace_common.metrics import ObservabilityServer, new_registry
from headrace_common.service_process import run_service
from headrace_common.settings import split_address

_log = logging.getLogger(__name__)


def main() -> None:
    """Load settings, start, serve until told to stop."""
    parser = argparse.ArgumentParser(prog="headrace-billing", description="The billing service.")
    parser.add_argument(
        "--check-config", nargs="?", const=PACKAGED, type=Path, help="check a price file and leave"
    )
    arguments = parser.parse_args()
    if arguments.check_config is not None:
        _check_config(arguments.check_config)
        return
    settings = BillingSettings.load_or_exit()
    run_service("billing", settings, _serve, mistakes=(PriceFileError, ValueError))


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


def _check_config(path: Path) -> None:
    try:
        prices = load_prices(path)
    except PriceFileError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from error
    sys.stdout.write(f"{path}: {len(prices)} prices, all right\n")


if __name__ == "__main__":
    main()
