from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
from pathlib import Path
from headrace_common.telemetry import Telemetry, TelemetrySettings, current_traceparent, span
telemetry = Telemetry("pump", TelemetrySettings.load(trace_dir=Path({dir!r}), sample_ratio=1.0))
with span("outer", attributes={{"litres": 3}}):
    parent = current_traceparent()
with span("inner", traceparent=parent):
    pass
try:
    with span("bad"):
        raise ValueError("broken")
except ValueError:
    pass
telemetry.shutdown()
"""


def test_spans_of_one_trace_are_written_as_json_lines(tmp_path) -> None:
    """A trace context given over the wire continues the same trace."""
    subprocess.run([sys.executable, "-c", PROGRAM.format(dir=str(tmp_path))], check=True)
    rows = [json.loads(line) for line in (tmp_path / "pump.jsonl").read_text().splitlines()]
    outer, inner, bad = rows
    assert (outer["name"], inner["name"]) == ("outer", "inner")
    assert inner["trace_id"] == outer["trace_id"]
    assert inner["parent_id"] == outer["span_id"]
    assert outer["attributes"] == {"litres": 3}
    assert "broken" in bad["error"]
    assert bad["trace_id"] != outer["trace_id"]


UNRECORDED = """
from opentelemetry import trace
from pathlib import Path
from headrace_common.telemetry import Telemetry, TelemetrySettings, current_traceparent, span
telemetry = Telemetry("pump", TelemetrySettings.load(trace_dir=Path({dir!r}), sample_ratio=0.0))
with span("outer"):
    outer = current_traceparent()
    with span("inner"):
        assert current_traceparent() == outer
with span("remote", traceparent=outer):
    assert current_traceparent() == outer
    with span("child of it"):
        assert current_traceparent() == outer
assert current_traceparent() == ""
with span("recorded elsewhere", traceparent="00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"):
    assert current_traceparent()[3:35] == "ab" * 16
    assert current_traceparent().endswith("-01")
    with span("again unrecorded", traceparent=outer):
        assert current_traceparent()[3:35] == outer[3:35]
    assert current_traceparent()[3:35] == "ab" * 16
with span("unreadable", traceparent="00-zz-zz-00"):
    assert current_traceparent().endswith(("-00", "-02"))
telemetry.shutdown()
"""


def test_a_trace_that_nobody_records_is_carried_on_and_not_written(tmp_path) -> None:
    """Its ids stay the same in every span and at every peer, and the context is left as it was."""
    subprocess.run([sys.executable, "-c", UNRECORDED.format(dir=str(tmp_path))], check=True)
    rows = [json.loads(line) for line in (tmp_path / "pump.jsonl").read_text().splitlines()]
    assert [row["name"] for row in rows] == ["recorded elsewhere"]
