"""Lines and tables."""

import io

import pytest

from headrace_launcher.display import LineDisplay, TableDisplay, make_display
from headrace_launcher.fleet_view import ChildView, FleetState, FleetView, Role
from headrace_launcher.text import status_text, table_text


def a_view(*children: ChildView) -> FleetView:
    return FleetView(FleetState.STARTING, 1, 0.0, "http://x", "m", "/s", children=list(children))


def test_prints_a_line_per_change_of_state_and_no_line_without_one() -> None:
    """Not a terminal: nothing is redrawn, nothing repeated."""
    out = io.StringIO()
    display = LineDisplay(out)
    child = ChildView("billing", Role.SERVICE, "waiting")
    display.update(a_view(child))
    assert out.getvalue() == ""
    child.state, child.address = "starting", "127.0.0.1:5"
    display.update(a_view(child))
    display.update(a_view(child))
    child.state = "ready"
    display.update(a_view(child))
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert "billing" in lines[0]
    assert "starting" in lines[0]
    assert "127.0.0.1:5" in lines[1]


def test_prints_a_line_per_tenth_of_a_download() -> None:
    """A long step shows that it goes on, without a hundred lines."""
    out = io.StringIO()
    display = LineDisplay(out)
    for percent in range(101):
        step = ChildView("model", Role.STEP, "starting", progress_ratio=percent / 100)
        display.update(a_view(step))
    assert len(out.getvalue().splitlines()) == 11


def test_a_terminal_gets_a_table_with_a_bar_and_lines_afterwards() -> None:
    """After `close` the table stands still; a restart later on is a line."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    display = make_display(out)
    assert isinstance(display, TableDisplay)
    worker = ChildView(
        "worker-1", Role.WORKER, "starting", "127.0.0.1:5", pid=3, progress_ratio=0.5
    )
    display.update(a_view(worker))
    display.close()
    drawn = out.getvalue()
    assert "worker-1" in drawn
    assert "━" in drawn or "-" in drawn
    display.update(a_view(worker))
    assert out.getvalue() == drawn
    worker.state, worker.progress_ratio = "restarting", None
    display.update(a_view(worker))
    assert "restarting" in out.getvalue()[len(drawn) :]


@pytest.mark.parametrize("state", ["waiting", "ready", "failed"])
def test_every_state_can_be_drawn(state: str) -> None:
    """Also those without a colour of their own."""
    out = io.StringIO()
    display = TableDisplay(out)
    display.update(a_view(ChildView("x", Role.SERVICE, state, detail="why")))
    display.close()
    assert state in out.getvalue()


def test_status_shows_address_pid_and_metrics() -> None:
    """The table of `headrace status`."""
    child = ChildView("billing", Role.SERVICE, "ready", "127.0.0.1:5", "127.0.0.1:6", pid=77)
    text = status_text(a_view(child))
    for word in ("billing", "ready", "127.0.0.1:5", "77", "127.0.0.1:6"):
        assert word in text


def test_a_table_is_as_wide_as_what_stands_in_it() -> None:
    """Numbers stand to the right, nothing is a dash, and no line ends in blanks."""
    rows = [("a-very-long-name", 5, "x"), ("b", 1200, ""), ("c", "", "y")]
    assert table_text(("name", "tokens", "note"), rows).splitlines() == [
        "name              tokens  note",
        "a-very-long-name       5  x",
        "b                   1200  -",
        "c                      -  y",
    ]
    assert table_text(("name",), []) == "name"
