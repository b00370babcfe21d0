"""Entry point of the guard."""

from __future__ import annotations

from pathlib import Path

from headrace_common.service_process import CheckedFile, run_service, take_arguments
from headrace_guard.policy import load_policies
from headrace_guard.server import serve_guard
from headrace_guard.settings import GuardSettings


def _check(path: Path | None) -> str:
    return "\n".join(f"{it.name}: {it.version}" for it in load_policies(path).values())


def main() -> None:
    """Run the guard until SIGTERM, or check a file of policies."""
    take_arguments("guard", GuardSettings, CheckedFile("policy_file", _check))
    run_service("guard", GuardSettings.load_or_exit(), serve_guard)


if __name__ == "__main__":
    main()
