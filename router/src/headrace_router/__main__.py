"""Entry point of the router."""

from __future__ import annotations

from pathlib import Path

from headrace_common.clock import SystemClock
from headrace_common.lifecycle import serve
from headrace_common.service_process import CheckedFile, run_service, take_arguments
from headrace_router.app import RouterApp
from headrace_router.policy_file import load_policy_file
from headrace_router.settings import RouterSettings


async def _serve(settings: RouterSettings) -> None:
    app = RouterApp(settings, SystemClock())
    await serve(app, app.lifecycle)


def _check(path: Path | None) -> str:
    return f"{path or 'the packaged file'}: policy {load_policy_file(path).pick.policy}"


def main() -> None:
    """Run the router until SIGTERM, or check a policy file."""
    take_arguments("router", RouterSettings, CheckedFile("policy_file", _check))
    run_service("router", RouterSettings.load_or_exit(), _serve)


if __name__ == "__main__":
    main()
