"""Commands that are programs of a service: `headrace simulate`, `headrace worker bench`.

The launcher imports no service; so each runs in a process of its own and gets its options as they
are.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

# Words of the command: (module, what it does).
PROGRAMS = {
    ("simulate",): ("headrace_router.simulate", "compare picking policies on a trace"),
    ("worker", "upstream"): (
        "headrace_worker.upstream",
        "serve an OpenAI-compatible server as a worker",
    ),
    ("worker", "bench"): ("headrace_worker.bench", "measure the engine on this machine"),
}
# The same by what the engine is.
_SPELLINGS = {("worker", "--engine", "openai"): "headrace_worker.upstream"}
_INTERRUPTED = 130


def program_of(arguments: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return module and options if *arguments* name such a program."""
    known = {words: module for words, (module, _) in PROGRAMS.items()} | _SPELLINGS
    for words, module in known.items():
        if tuple(arguments[: len(words)]) == words:
            return module, list(arguments[len(words) :])
    return None


def run_program(module: str, options: Sequence[str]) -> int:
    """Run it to its end; return its exit code."""
    try:
        return subprocess.run([sys.executable, "-m", module, *options], check=False).returncode
    except KeyboardInterrupt:
        # The terminal told the child as well.
        return _INTERRUPTED
