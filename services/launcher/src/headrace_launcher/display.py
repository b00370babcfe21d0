"""Shows a fleet as it starts: a live table with bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from headrace_launcher.child_state import ChildState
from headrace_launcher.fleet_view import ChildView, FleetView

_COLOURS = {
    ChildState.READY: "green",
    ChildState.STARTING: "cyan",
    ChildState.UNREADY: "yellow",
    ChildState.BACKOFF: "yellow",
    ChildState.FAILED: "red",
}
_PLAIN_STEP_RATIO = 0.1


class Display(Protocol):
    """Takes each new view of a fleet."""

    def update(self, view: FleetView) -> None:
        """Show *view*; cheap enough to be called on every change."""

    def close(self) -> None:
        """Leave the last view standing and free the terminal."""


def make_display(out: TextIO) -> Display:
    """Return the display that suits *out*."""
    return TableDisplay(out) if out.isatty() else LineDisplay(out)


class LineDisplay:
    """One line per change of state, and one per tenth of a long step."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._started_s = out, time.monotonic()
        self._shown: dict[str, tuple[str, int]] = {}

    def update(self, view: FleetView) -> None:
        """Print what has changed."""
        for child in view.children:
            if self.is_news(child):
                age_s = time.monotonic() - self._started_s
                self._out.write(f"[{age_s:6.1f} s] {_line(child)}\n")
        self._out.flush()

    def is_news(self, child: ChildView) -> bool:
        """Tell whether *child* differs from what was shown, and take it as shown."""
        tenths = int((child.progress_ratio or 0) / _PLAIN_STEP_RATIO)
        now = (child.state, tenths)
        before = self._shown.get(child.name, (ChildState.WAITING.value, 0))
        self._shown[child.name] = now
        return now != before

    def close(self) -> None:
        """Nothing to free."""


class TableDisplay:
    """A table that redraws itself in place until `close`; from then on, lines."""

    def __init__(self, out: TextIO) -> None:
        self._live = Live(console=Console(file=out), refresh_per_second=8, transient=False)
        self._lines = LineDisplay(out)
        self._live.start()

    def update(self, view: FleetView) -> None:
        """Redraw."""
        if not self._live.is_started:
            self._lines.update(view)
            return
        for child in view.children:
            self._lines.is_news(child)
        self._live.update(_table(view))

    def close(self) -> None:
        """Draw once more and leave the table standing."""
        if self._live.is_started:
            self._live.stop()


def _line(child: ChildView) -> str:
    parts = [f"{child.name:<12} {child.state:<10} {child.address:<21}"]
    if child.progress_ratio is not None:
        parts.append(f"{child.progress_ratio:4.0%}")
    if child.detail:
        parts.append(child.detail)
    return " ".join(parts).rstrip()


def _table(view: FleetView) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("service", "state", "address", "pid", ""):
        table.add_column(title, justify="right" if title == "pid" else "left", no_wrap=True)
    for child in view.children:
        bar: ProgressBar | str = child.detail
        if child.progress_ratio is not None:
            bar = ProgressBar(total=1.0, completed=child.progress_ratio, width=24)
        colour = _COLOURS.get(ChildState(child.state), "dim")
        state = f"[{colour}]{child.state}[/]"
        table.add_row(child.name, state, child.address, str(child.pid or ""), bar)
    return table
