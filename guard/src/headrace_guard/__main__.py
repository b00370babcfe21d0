"""Start the guard, or check a policy file: ``python -m headrace_guard [--check-config [FILE]]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from headrace_common.service_process import run_service
from headrace_guard.policy import PolicyError, load_policies
from headrace_guard.server import serve_guard
from headrace_guard.settings import GuardSettings

_PACKAGED = "packaged"


def check_config(path: Path | None) -> int:
    """Read a policy file and say what is in it or wrong with it; return the exit code."""
    try:
        policies = load_policies(path)
    except PolicyError as error:
        sys.stderr.write(f"{path or 'default.toml'}:\n{error}\n")
        return 1
    for policy in policies.values():
        sys.stdout.write(f"{policy.name}: {policy.version}\n")
    return 0


def main(arguments: list[str] | None = None) -> None:
    """Run the service or the check."""
    parser = argparse.ArgumentParser(prog="headrace_guard", description=__doc__)
    parser.add_argument(
        "--check-config",
        nargs="?",
        const=_PACKAGED,
        metavar="FILE",
        help="check a policy file (or the packaged one) and exit",
    )
    wanted = parser.parse_args(arguments).check_config
    if wanted is not None:
        raise SystemExit(check_config(None if wanted == _PACKAGED else Path(wanted)))
    settings = GuardSettings.load_or_exit()
    run_service("guard", settings, serve_guard, mistakes=(PolicyError,))


if __name__ == "__main__":
    main()
