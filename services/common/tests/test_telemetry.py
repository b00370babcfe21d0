from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult

from headrace_common import telemetry
from headrace_common.telemetry import JsonLinesExporter

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


CLOSED_ELSEWHERE = """
import asyncio
from pathlib import Path
from headrace_common.telemetry import Telemetry, TelemetrySettings, current_traceparent, span
telemetry = Telemetry("pump", TelemetrySettings.load(trace_dir=Path({dir!r}), sample_ratio=1.0))
async def rows():
    with span("rows"):
        yield 1
async def main():
    open_rows = rows()
    await asyncio.create_task(anext(open_rows))
    with span("closing"):
        before = current_traceparent()
        await open_rows.aclose()
        assert current_traceparent() == before
asyncio.run(main())
telemetry.shutdown()
"""


def test_a_generator_that_another_task_closes_ends_its_span_without_an_error(tmp_path) -> None:
    """Its context is not there any more; the closing task's stays as it is."""
    program = [sys.executable, "-c", CLOSED_ELSEWHERE.format(dir=str(tmp_path))]
    ended = subprocess.run(program, check=True, capture_output=True, text=True)
    assert ended.stderr == ""
    rows = [json.loads(line) for line in (tmp_path / "pump.jsonl").read_text().splitlines()]
    assert [(row["name"], row["error"]) for row in rows] == [("rows", ""), ("closing", "")]


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


SHARE = """
from pathlib import Path
from headrace_common.telemetry import Telemetry, TelemetrySettings, span
telemetry = Telemetry("pump", TelemetrySettings.load(trace_dir=Path({dir!r}), sample_ratio=0.5))
for _ in range(2000):
    with span("outer"), span("inner"):
        pass
telemetry.shutdown()
"""


def test_the_share_of_traces_that_is_recorded_is_the_one_set(tmp_path) -> None:
    """It is decided once for each trace, not again for its first span."""
    subprocess.run([sys.executable, "-c", SHARE.format(dir=str(tmp_path))], check=True)
    rows = [json.loads(line) for line in (tmp_path / "pump.jsonl").read_text().splitlines()]
    names = [row["name"] for row in rows]
    # Ten standard deviations.
    assert abs(names.count("outer") - 1000) < 224
    assert names.count("inner") == names.count("outer")


AWAY = """
import time
from headrace_common.telemetry import Telemetry, TelemetrySettings, span
telemetry = Telemetry("pump", TelemetrySettings.load(otlp_endpoint={url!r}, sample_ratio=1.0))
for _ in range(5000):
    with span("lost"):
        pass
began_s = time.monotonic()
telemetry.shutdown()
print(time.monotonic() - began_s)
"""


def test_a_collector_that_is_away_does_not_hold_up_the_end() -> None:
    """Ten batches wait, each of which would be tried for two seconds."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        program = [sys.executable, "-c", AWAY.format(url=url)]
        done = subprocess.run(program, check=True, capture_output=True, text=True, timeout=60)
    assert float(done.stdout) < 10.0


def _export(exporter: JsonLinesExporter, name: str) -> SpanExportResult:
    span = TracerProvider().get_tracer("test").start_span(name)
    span.end()
    return exporter.export([span])


def _names(*paths: Path) -> list[str]:
    return [json.loads(line)["name"] for path in paths for line in path.read_text().splitlines()]


def test_a_full_file_that_cannot_be_replaced_is_written_to_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A moment without disk or descriptors must not end tracing for good."""
    path = tmp_path / "pump.jsonl"
    exporter = JsonLinesExporter(path, "pump")
    monkeypatch.setattr(telemetry, "_MAX_FILE_BYTES", 1)
    with monkeypatch.context() as broken:

        def no_file(*_args: object, **_options: object) -> None:
            raise OSError("no room")

        broken.setattr(Path, "open", no_file)
        assert _export(exporter, "a") is SpanExportResult.FAILURE
        assert _export(exporter, "b") is SpanExportResult.FAILURE
    assert _export(exporter, "c") is SpanExportResult.SUCCESS
    monkeypatch.setattr(telemetry, "_MAX_FILE_BYTES", 1 << 20)
    assert _export(exporter, "d") is SpanExportResult.SUCCESS
    exporter.shutdown()
    assert _names(path.with_suffix(".jsonl.1"), path) == ["a", "b", "c", "d"]


def test_processes_that_share_a_file_lose_nothing_when_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever finds it full second must not move the fresh file over the full one."""
    path = tmp_path / "pump.jsonl"
    one, other = (JsonLinesExporter(path, "pump") for _ in range(2))
    _export(one, "a")
    _export(other, "b")
    monkeypatch.setattr(telemetry, "_MAX_FILE_BYTES", 1)
    _export(one, "c")
    _export(other, "d")
    monkeypatch.setattr(telemetry, "_MAX_FILE_BYTES", 1 << 20)
    _export(one, "e")
    _export(other, "f")
    one.shutdown()
    other.shutdown()
    assert _names(path.with_suffix(".jsonl.1"), path) == ["a", "b", "c", "d", "e", "f"]


TALKATIVE = """
import logging
from headrace_common.telemetry import Telemetry, TelemetrySettings
telemetry = Telemetry("pump", TelemetrySettings())
logging.getLogger("httpx").info("HTTP Request: POST http://127.0.0.1/")
logging.getLogger("httpx").warning("something is wrong")
logging.getLogger("pump").info("turning")
telemetry.shutdown()
"""


def test_requests_to_others_leave_no_lines_in_the_log() -> None:
    """A client that logs each of them would soon have pushed everything else out of it."""
    done = subprocess.run(
        [sys.executable, "-c", TALKATIVE], check=True, capture_output=True, text=True
    )
    assert [line.split(": ", 1)[1] for line in done.stderr.splitlines()] == [
        "something is wrong",
        "turning",
    ]
