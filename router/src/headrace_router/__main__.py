"""Entry point of the router."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from headrace_common.clock import SystemClock
from headrace_common.lifecycle import serve
from headrace_common.service_process import run_service
from headrace_common.settings import SettingsError
from headrace_router.app import RouterApp
from headrace_router.policy_file import load_policy_file
from headrace_router.settings import RouterSettings


async def _serve(settings: RouterSettings) -> None:
    app = RouterApp(settings, SystemClock())
    await serve(app, app.lifecycle)


def main() -> None:
    """Run the router until SIGTERM, or check a policy file."""
    parser = argparse.ArgumentParser(prog="headrace-router")
    parser.add_argument(
        "--check-config", metavar="FILE", type=Path, help="check a policy file and leave"
    )
    check: Path | None = parser.parse_args().check_config
    settings = RouterSettings.load_or_exit()
    try:
        load_policy_file(check or settings.policy_file)
    except SettingsError as error:
        sys.stderr.write(f"headrace-router: {error}\n")
        raise SystemExit(2) from error
    if check is None:
        run_service("router", settings, _serve)


if __name__ == "__main__":
    main()
