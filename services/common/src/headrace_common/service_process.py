"""A service as a process: telemetry, the event loop, and what its end tells whoever started it.

Exit codes: 0 = drained, 1 = it could not start or failed, 2 = its settings are wrong, so that
starting it again is no use.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from headrace_common.lifecycle import run
from headrace_common.settings import EXIT_BAD_SETTINGS, ServiceSettings, SettingsError
from headrace_common.telemetry import Telemetry, TelemetrySettings

_EXIT_FAILED = 1
S = TypeVar("S", bound=ServiceSettings)


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """A file of policy that can be checked before a service reads it.

    Args:
        setting: the field of the settings that names it.
        check: reads the file, or for None what stands in for it, and returns what it found, in
            lines for people; raises `SettingsError` for whatever the service would refuse.
    """

    setting: str
    check: Callable[[Path | None], str]


def take_arguments(
    name: str, settings: type[ServiceSettings], file: CheckedFile | None = None
) -> None:
    """Answer ``--help`` and ``--check-config``, and refuse any other argument of a service.

    Args:
        name: of the service.
        settings: whose variables are named.
        file: what ``--check-config`` checks; without it there is no such option.

    Raises:
        SystemExit: there are arguments. A file that is wrong ends with the code of wrong settings.
    """
    text = f"Set by environment variables, {settings.prefix}*: docs/CONFIG.md lists them."
    parser = argparse.ArgumentParser(f"headrace-{name}", description=text, allow_abbrev=False)
    if file is None:
        parser.parse_args()
        return
    variable = f"{settings.prefix}{file.setting.upper()}"
    parser.add_argument(
        "--check-config",
        nargs="?",
        const=variable,
        metavar="FILE",
        help=f"say what is in a file for {variable}, or what is wrong with it, and leave; "
        "without FILE the one that is set",
    )
    asked: str | None = parser.parse_args().check_config
    if asked is None:
        return
    path = getattr(settings.load_or_exit(), file.setting) if asked == variable else Path(asked)
    try:
        sys.stdout.write(f"{file.check(path)}\n")
    except SettingsError as error:
        sys.stderr.write(f"headrace-{name}: {error}\n")
        raise SystemExit(EXIT_BAD_SETTINGS) from error
    raise SystemExit(0)


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
