"""Start a worker: settings, telemetry, run."""

from __future__ import annotations

import logging
import os
import sys
import threading

from headrace_common.clock import SystemClock
from headrace_common.errors import HeadraceError
from headrace_common.metrics import new_registry
from headrace_common.service_process import run_service, take_arguments
from headrace_worker.app import LOAD_THREAD, serve
from headrace_worker.engine.engine import ENGINE_THREAD
from headrace_worker.engine.token_table import UnknownTokenizer
from headrace_worker.settings import WorkerSettings


def main() -> None:
    """Run until told to stop; exit code 0 = drained, 1 = could not start, 2 = bad settings."""
    take_arguments("worker", WorkerSettings)
    settings = WorkerSettings.load_or_exit()
    run_service("worker", settings, _serve, failures=(HeadraceError, UnknownTokenizer))
    leave()


async def _serve(settings: WorkerSettings) -> None:
    await serve(settings, SystemClock(), new_registry())


def leave() -> None:
    """End the process here if a thread that could not be waited for still computes.

    The interpreter would unwind it at its own end, which the C++ below it does not survive.
    """
    if any(thread.name in (ENGINE_THREAD, LOAD_THREAD) for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
