"""`headrace simulate`: the router's simulator, in a process of its own.

The launcher imports no service; so the options are the simulator's, handed on as they are.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

_MODULE = "headrace_router.simulate"
_INTERRUPTED = 130


def simulate(arguments: Sequence[str]) -> int:
    """Run the simulator to its end; return its exit code."""
    try:
        return subprocess.run([sys.executable, "-m", _MODULE, *arguments], check=False).returncode
    except KeyboardInterrupt:
        # The terminal told the child as well.
        return _INTERRUPTED
