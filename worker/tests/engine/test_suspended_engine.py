"""An engine whose process was suspended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace_common.awake import MOST_BETWEEN_LOOKS_S

STOPPED_S = 4.0
# An engine whose model hangs; the child says how long, each time it is asked to.
CHILD = """
import sys, threading
from test_engine import Bench, request
with Bench() as bench:
    bench.runner.go.clear()
    bench.engine.submit(request("abc", 1))
    for _ in sys.stdin:
        print(bench.engine.stalled_s(), flush=True)
    bench.runner.go.set()
    bench.wait(lambda: bench.is_over(1))
"""


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs signals that suspend")
def test_a_suspended_engine_has_not_stalled_meanwhile() -> None:
    """Right after SIGCONT, before any step, a hanging engine counts only what it was awake."""
    path = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ, PYTHONPATH=path),
    ) as child:
        to_child, from_child = child.stdin, child.stdout
        assert to_child is not None
        assert from_child is not None

        def stalled_s() -> float:
            to_child.write("\n")
            to_child.flush()
            return float(from_child.readline())

        asked_s = time.monotonic()
        before_s = stalled_s()
        time.sleep(0.3)
        assert stalled_s() > before_s
        child.send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)
        child.send_signal(signal.SIGCONT)
        after_s = stalled_s()
        assert after_s - before_s <= time.monotonic() - asked_s - STOPPED_S + MOST_BETWEEN_LOOKS_S
        to_child.close()
        assert child.wait(30) == 0
