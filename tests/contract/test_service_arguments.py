"""What each service's program does with an argument that it does not know."""

from __future__ import annotations

import subprocess
import sys

import pytest

SERVICES = ("gateway", "guard", "router", "cache_index", "ratelimit", "billing", "worker")


@pytest.mark.parametrize("service", SERVICES)
def test_an_unknown_argument_ends_the_start(service: str) -> None:
    """Passed over, `headrace-gateway --port 9000` would listen somewhere else."""
    program = [sys.executable, "-m", f"headrace_{service}", "--no-such-option"]
    done = subprocess.run(program, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "unrecognized arguments: --no-such-option" in done.stderr
