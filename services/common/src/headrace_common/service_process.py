"""A service as a process: telemetry, the event loop, and what its end tells whoever started it.

Exit codes: 0 = drained, 1 = it could not start or failed, 2 = its settings are wrong, so that
starting it again is no use.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from headrace_common.lifecycle import run
from headrace_common.settings import EXIT_BAD_SETTINGS, ServiceSettings, SettingsError
from headrace_common.telemetry import Telemetry, TelemetrySettings

_EXIT_FAILED = 1
S = TypeVar("S", bound=ServiceSettings)


def take_no_arguments(name: str, settings: type[ServiceSettings]) -> None:
    """Answer ``--help``, and refuse any other argument, of a service that only has settings.

    Args:
        name: of the service.
        settings: whose variables are named.

    Raises:
        SystemExit: there are arguments.
    """
    text = f"Set by environment variables, {settings.prefix}*: docs/CONFIG.md lists them."
    parser = argparse.ArgumentParser(f"headrace-{name}", description=text, allow_abbrev=False)
    parser.parse_args()


def run_service(
    name: str,
    settings: S,
    serve: Callable[[S], Coroutine[Any, Any, None]],  # Any: the coroutine's own send types
    *,
    mistakes: tuple[type[Exception], ...] = (),
    failures: tuple[type[Exception], ...] = (),
) -> None:
    """Run a service until it has been told to stop.

    Args:
        name: of the service.
        settings: all knobs; logged once.
        serve: the service's main coroutine.
        mistakes: what it raises, beside `SettingsError`, where files of its settings are wrong.
        failures: what it raises, beside `OSError`, where it cannot start for another reason.

    Raises:
        SystemExit: it could not start; the reason, a sentence for people, is on standard error.
    """
    wrong: tuple[type[Exception], ...] = (SettingsError, *mistakes)
    failed: tuple[type[Exception], ...] = (OSError, *failures)
    telemetry = Telemetry(name, TelemetrySettings.load_or_exit())
    settings.log_values()
    try:
        run(serve(settings))
    except wrong as error:
        sys.stderr.write(f"{name}: {error}\n")
        raise SystemExit(EXIT_BAD_SETTINGS) from error
    except failed as error:
        sys.stderr.write(f"{name}: {error}\n")
        raise SystemExit(_EXIT_FAILED) from error
    finally:
        telemetry.shutdown()
