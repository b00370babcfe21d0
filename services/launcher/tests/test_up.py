"""`headrace up`, `down` and `status` where no fleet comes up; tests/e2e has the other cases."""

import argparse
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from headrace_launcher.cli import build_parser, run
from headrace_launcher.ports import free_ports
from headrace_launcher.state_dir import StateDir


@pytest.fixture(autouse=True)
def _no_settings_of_the_developer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_LAUNCHER_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("HEADRACE_LAUNCHER_PORT", str(free_ports(1)[0]))


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_a_port_in_use_stops_the_start_with_words(
    busy_port: int, detach: list[str], capsys: Any
) -> None:
    """Exit code 1, the port and the option in the message; nothing is started."""
    assert run(["up", "--port", str(busy_port), *detach]) == 1
    message = capsys.readouterr().err
    assert f"port {busy_port}" in message
    assert "--port" in message


def test_a_second_fleet_in_the_same_state_directory_is_refused(tmp_path: Path, capsys: Any) -> None:
    """The message says how to see and stop the first one."""
    first = StateDir(tmp_path / "state")
    first.create()
    first.lock()
    assert run(["up"]) == 1
    first.unlock()
    assert "headrace down" in capsys.readouterr().err


@pytest.mark.parametrize("detach", [[], ["--detach"]])
def test_a_missing_model_stops_the_start_with_words(
    detach: list[str], tmp_path: Path, capsys: Any
) -> None:
    """Also when the fleet was to start in the background; afterwards none runs."""
    missing = tmp_path / "no.gguf"
    assert run(["up", "--model", str(missing), *detach]) == 1
    assert f"there is no model at {missing}" in capsys.readouterr().err
    assert run(["status", "--json"]) == 3
    status = json.loads(capsys.readouterr().out)
    assert status["state"] in ("failed", "stopped")
    assert str(missing) in status["message"]


def test_stores_that_do_not_answer_stop_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A wrong URL is found before anything is started."""
    monkeypatch.setenv("HEADRACE_LAUNCHER_REDIS_URL", f"redis://127.0.0.1:{free_ports(1)[0]}/0")
    assert run(["up"]) == 1
    assert "HEADRACE_LAUNCHER_REDIS_URL" in capsys.readouterr().err


def test_what_the_system_refuses_stops_the_start_with_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """Not with a traceback; and the fleet has failed, not been stopped."""

    def none_left(_count: int) -> list[int]:
        raise OSError("no 30 free ports")

    async def no_embedding(*_args: object) -> None:
        return None

    monkeypatch.setattr("headrace_launcher.fleet.free_ports", none_left)
    monkeypatch.setattr("headrace_launcher.fleet.fetch_embedding", no_embedding)
    model = tmp_path / "model.gguf"
    model.write_bytes(b"")
    assert run(["up", "--model", str(model)]) == 1
    assert "no 30 free ports" in capsys.readouterr().err
    assert run(["status", "--json"]) == 3
    assert "no 30 free ports" in json.loads(capsys.readouterr().out)["message"]


def test_gateways_beyond_the_last_port_are_a_wrong_setting(capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(["up", "--port", "65535", "--gateways", "2"])
    assert "2 gateways from port 65535" in capsys.readouterr().err


def test_unknown_settings_stop_every_command(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A typing mistake is not ignored."""
    monkeypatch.setenv("HEADRACE_LAUNCHER_WORKRES", "3")
    with pytest.raises(SystemExit) as caught:
        run(["status"])
    assert caught.value.code == 2
    assert "HEADRACE_LAUNCHER_WORKRES" in capsys.readouterr().err


def test_status_and_down_without_a_fleet(tmp_path: Path, capsys: Any) -> None:
    """Status says so by exit code 3; down is content."""
    assert run(["status"]) == 3
    assert str(tmp_path / "state") in capsys.readouterr().err
    assert run(["status", "--json"]) == 3
    status = json.loads(capsys.readouterr().out)
    assert (status["state"], status["services"], status["workers"]) == ("stopped", [], [])
    assert run(["down"]) == 0


@pytest.mark.parametrize("command", [["status"], ["down"]])
def test_quick_commands_do_not_wait_for_grpc(command: list[str]) -> None:
    """Scripts ask for the status often; what takes long to import is not imported for it."""
    code = (
        "import sys\nfrom headrace_launcher.cli import run\n"
        f"run({command!r})\n"
        "sys.exit(bool({'grpc', 'rich', 'headrace_launcher.supervisor'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_every_command_can_be_found() -> None:
    """Commands are named by text: each name must lead to a function."""
    for handler in handlers(build_parser()):
        module, _, function = handler.partition(":")
        assert callable(getattr(import_module(f"headrace_launcher.{module}"), function))


def handlers(parser: argparse.ArgumentParser) -> Iterator[str]:
    if handler := parser.get_default("handler"):
        yield handler
    for action in parser._actions:
        for child in (action.choices or {}).values() if isinstance(action.choices, dict) else ():
            yield from handlers(child)
