"""Plain text for people, without the weight of a drawing library."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence

from headrace_launcher.fleet_view import FleetView

_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def status_text(view: FleetView) -> str:
    """Return the plain table of ``headrace status``."""
    columns = ("service", "state", "address", "pid", "metrics")
    rows = [(c.name, c.state, c.address, c.pid or "-", c.metrics_address) for c in view.children]
    return table_text(columns, rows)


def table_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Lay out rows below their columns' names, columns of numbers to the right; "-" is nothing."""
    cells = [[str(cell) or "-" for cell in row] for row in rows]
    lines = []
    for line in (list(columns), *cells):
        places = zip(line, zip(columns, *cells, strict=True), strict=True)
        lines.append("  ".join(_placed(cell, column) for cell, column in places).rstrip())
    return "\n".join(lines)


def _placed(cell: str, column: Sequence[str]) -> str:
    width, values = max(map(len, column)), [value for value in column[1:] if value != "-"]
    is_number = bool(values) and all(_NUMBER.fullmatch(value) for value in values)
    return cell.rjust(width) if is_number else cell.ljust(width)


def say(text: str) -> None:
    """Print an error or remark for people to stderr."""
    print(f"headrace: {text}", file=sys.stderr)
