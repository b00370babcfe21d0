"""Kills gateways, broker and billing at random for minutes, then counts what the ledger holds.

Usage: ``python bench/ledger_crash.py [--minutes 5] [--seed 1]``, with ``tests/support`` installed
as ``make setup`` does. Prints one JSON object; ends with code 1 if anything is missing, doubled or
priced wrongly. What is done is said in `headrace_testing.ledger_crash`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from pathlib import Path

from headrace_testing.ledger_crash import CrashReport, crash_fleet


async def run(minutes: float, seed: int) -> CrashReport:
    """Run it in a temporary folder."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADRACE_")}
    with tempfile.TemporaryDirectory(prefix="headrace-crash-") as folder:
        async with crash_fleet(Path(folder), environment, seed) as fleet:
            return await fleet.run(minutes * 60)


def main() -> None:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    report = asyncio.run(run(options.minutes, options.seed))
    print(json.dumps(report.to_json(), indent=1))
    raise SystemExit(1 if report.problems else 0)


if __name__ == "__main__":
    main()
