"""What a started fleet tells: commands that can be typed as they stand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace_launcher.first_key import FirstKey
from headrace_launcher.fleet_view import FleetState, FleetView
from headrace_launcher.welcome import curl_line, program, welcome

VIEW = FleetView(FleetState.RUNNING, 1, 0.0, "http://127.0.0.1:8080", "tiny", "/state")
OWN = Path(sys.executable).with_name("headrace")


def test_a_shell_without_the_environment_gets_the_whole_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`make up` does not activate `.venv`, so the bare name would not be found."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() == str(OWN)


def test_an_activated_environment_gets_the_bare_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(OWN.parent))
    assert program() == "headrace"


def test_another_installation_of_that_name_is_not_taken_for_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "headrace"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() == str(OWN)


def test_the_commands_told_are_whole() -> None:
    text = welcome(VIEW, FirstKey(api_key="sk-hr-x"), "/venv/headrace", detached=True)
    assert "/venv/headrace down --state-dir /state" in text
    assert "/venv/headrace keys create --tenant default" in text
    assert "Bearer sk-hr-x" in text


def test_a_key_that_is_gone_is_told_by_its_beginning() -> None:
    text = welcome(VIEW, FirstKey(prefix="sk-hr-abc"), "headrace", detached=False)
    assert "begins with sk-hr-abc" in text
    assert "YOUR_KEY" in text
    assert "Stop it: Ctrl-C" in text


def test_a_base_model_is_not_asked_to_chat() -> None:
    """Without a chat template that line would get a 400."""
    assert "/v1/chat/completions" in curl_line("http://h:1", "k", "smollm2-135m-instruct")
    line = curl_line("http://h:1", "k", "gemma3-270m")
    assert "/v1/completions" in line
    assert "messages" not in line
