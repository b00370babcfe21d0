"""The programs that are not Python."""

import subprocess
from pathlib import Path

import pytest

from headrace_launcher import programs


def test_the_packaged_store_and_broker_run_here() -> None:
    """Both are real programs for this platform."""
    valkey = subprocess.run(
        [programs.valkey_server(), "--version"], capture_output=True, text=True, check=True
    )
    assert "Valkey server" in valkey.stdout
    broker = subprocess.run(
        [programs.kafka_broker(), "broker", "--help"], capture_output=True, text=True, check=True
    )
    assert "--storage-engine" in broker.stdout


def test_without_the_packages_the_message_names_the_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A platform without wheels can use servers that run elsewhere."""
    monkeypatch.setattr(programs, "_package_folder", lambda _name: tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(programs.ProgramMissingError, match="HEADRACE_LAUNCHER_REDIS_URL"):
        programs.valkey_server()
    with pytest.raises(programs.ProgramMissingError, match="HEADRACE_LAUNCHER_KAFKA_BOOTSTRAP"):
        programs.kafka_broker()


def test_a_store_on_the_path_is_the_second_choice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """E.g. the distribution's redis-server."""
    server = tmp_path / "redis-server"
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    monkeypatch.setattr(programs, "_package_folder", lambda _name: tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert programs.valkey_server() == server
