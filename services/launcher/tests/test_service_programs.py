"""Commands that are programs of a service hand their options on."""

import json
from pathlib import Path

import pytest

from headrace_launcher.cli import build_parser, run


def test_it_runs_the_routers_simulator(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Options of the same name as the launcher's own are the simulator's."""
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
    trace.write_text(json.dumps(row) + "\n")
    options = ["--trace", str(trace), "--workers", "2", "--policies", "random", "--json"]
    assert run(["simulate", *options]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["workers"] == 2
    assert told["policies"][0]["policy"] == "random"


def test_wrong_options_are_the_simulators_to_refuse(capfd: pytest.CaptureFixture[str]) -> None:
    """With its exit code."""
    assert run(["simulate", "--policies", "no-such"]) == 2
    assert "no such policy" in capfd.readouterr().err


def test_the_workers_bench_is_one(capfd: pytest.CaptureFixture[str]) -> None:
    """`headrace worker bench` is found by both words; a mistake is its own to tell."""
    assert run(["worker", "bench", "no-such-file.gguf"]) == 1
    assert "no model at no-such-file.gguf" in capfd.readouterr().err


def test_an_upstream_is_a_worker_by_its_engine(capfd: pytest.CaptureFixture[str]) -> None:
    """`headrace worker --engine openai` and `headrace worker upstream` are one."""
    options = ["--upstream-url", "http://user:secret@host/v1", "--upstream-model", "m"]
    assert run(["worker", "--engine", "openai", *options]) == 2
    assert "HEADRACE_UPSTREAM_URL" in capfd.readouterr().err


def test_help_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Like every command."""
    text = build_parser().format_help()
    assert "simulate" in text
    assert "worker" in text
