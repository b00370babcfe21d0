"""Plain text for people, without the weight of a drawing library."""

from __future__ import annotations

import sys

from headrace_launcher.fleet_view import FleetView


def status_text(view: FleetView) -> str:
    """Return the plain table of ``headrace status``."""
    rows = [f"{'service':<12} {'state':<10} {'address':<21} {'pid':>7}  metrics"]
    rows += [
        f"{c.name:<12} {c.state:<10} {c.address:<21} {c.pid or '-':>7}  {c.metrics_address or '-'}"
        for c in view.children
    ]
    return "\n".join(rows)


def say(text: str) -> None:
    """Print an error or remark for people to stderr."""
    print(f"headrace: {text}", file=sys.stderr)
