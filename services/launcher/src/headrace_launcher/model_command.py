"""``headrace model``: models on this machine, without a fleet."""

from __future__ import annotations

import sys
from argparse import Namespace

from headrace_launcher.child_state import ChildState
from headrace_launcher.display import make_display
from headrace_launcher.fleet import fetch_embedding, fetch_model, run_until_done
from headrace_launcher.fleet_view import ChildView, FleetState, FleetView, Role
from headrace_launcher.model_fetch import ModelError
from headrace_launcher.preflight import PreflightError
from headrace_launcher.process import Spawner, StartError
from headrace_launcher.settings import LauncherSettings
from headrace_launcher.text import say


def fetch(settings: LauncherSettings, args: Namespace) -> int:
    """Bring the default model, and the guard's own, into the cache; print the former's path."""
    del args
    return run_until_done(_fetch(settings))


async def _fetch(settings: LauncherSettings) -> int:
    step = ChildView("model", Role.STEP, ChildState.STARTING.value)
    view = FleetView(FleetState.STARTING, 0, 0.0, "", settings.model_name, "", children=[step])
    display = make_display(sys.stderr)

    def report(ratio: float | None, detail: str) -> None:
        step.progress_ratio, step.detail = ratio, detail
        display.update(view)

    try:
        async with Spawner() as spawner:
            model = await fetch_model(settings, spawner, report)
            await fetch_embedding(settings, spawner, report)
    except (ModelError, PreflightError, StartError) as error:
        say(str(error))
        return 1
    finally:
        display.close()
    print(model)
    return 0
