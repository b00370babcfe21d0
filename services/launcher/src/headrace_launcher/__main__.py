"""Entry point of `headrace`."""

from __future__ import annotations

import sys

from headrace_launcher.cli import run


def main() -> None:
    """Run the command line."""
    raise SystemExit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
