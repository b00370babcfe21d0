"""What a started fleet tells its operator."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from headrace_launcher.first_key import FirstKey
from headrace_launcher.fleet_view import FleetView, Role
from headrace_launcher.model_catalog import MODELS


def curl_line(base_url: str, api_key: str, model: str) -> str:
    """Return one shell line that streams an answer."""
    known = MODELS.get(model)
    if known is None or known.chats:
        path, asked = "chat/completions", [{"role": "user", "content": "Why is the sky blue?"}]
        body = json.dumps({"model": model, "stream": True, "messages": asked})
    else:
        path = "completions"
        body = json.dumps({"model": model, "stream": True, "prompt": "The sky is blue because"})
    return (
        f"curl -N {base_url}/v1/{path} -H 'Authorization: Bearer {api_key}' "
        f"-H 'Content-Type: application/json' -d '{body}'"
    )


def program() -> str:
    """Return what to type for this installation's `headrace` in a shell like the caller's.

    `make up` runs it out of `.venv` without activating that, so the bare name may not be found.
    """
    own = Path(sys.executable).with_name("headrace")
    if not own.exists():
        return f"{sys.executable} -m headrace_launcher"
    found = shutil.which("headrace")
    return "headrace" if found and Path(found).samefile(own) else str(own)


def welcome(view: FleetView, key: FirstKey, headrace: str, *, detached: bool) -> str:
    """Render the text.

    Args:
        view: the fleet.
        key: what can be shown of its first key.
        headrace: how to call the launcher, from `program`.
        detached: decides which way to stop is told.
    """
    services = [c for c in view.children if c.role in (Role.SERVICE, Role.WORKER)]
    metrics = [f"  {c.name:<12} http://{c.metrics_address}/metrics" for c in services]
    more = f"{headrace} keys create --tenant default --name NAME --state-dir {view.state_dir}"
    shown = key.api_key or f"(only its hash is kept; one begins with {key.prefix})"
    stop = f"{headrace} down --state-dir {view.state_dir}" if detached else "Ctrl-C"
    return "\n".join(
        [
            "",
            f"Headrace is running: {view.base_url}/v1, model {view.model}",
            "",
            f"API key       {shown}",
            f"another key   {more}",
            f"state, logs   {view.state_dir}",
            "metrics",
            *metrics,
            "",
            "Try it:",
            f"  {curl_line(view.base_url, key.api_key or 'YOUR_KEY', view.model)}",
            "",
            f"Stop it: {stop}",
            "",
        ]
    )
