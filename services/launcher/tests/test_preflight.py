"""What is checked before anything starts."""

import errno
import os
import shutil
import socket
from pathlib import Path

import pytest

from headrace_launcher import preflight
from headrace_launcher.preflight import Endpoint, PreflightError
from headrace_launcher.state_dir import StateDir


def test_a_port_in_use_is_named_with_its_holder_and_the_way_out() -> None:
    """The message has the port, the process, and the option."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        with pytest.raises(PreflightError) as caught:
            preflight.check_port(Endpoint("127.0.0.1", port))
    message = str(caught.value)
    assert f"port {port} on 127.0.0.1 is in use by process" in message
    assert "--port" in message


def test_a_port_that_is_free_passes() -> None:
    """No error, and the port is free afterwards too."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    preflight.check_port(Endpoint("127.0.0.1", port))
    preflight.check_port(Endpoint("127.0.0.1", port))


def test_an_address_that_is_not_ours_is_refused() -> None:
    """E.g. a typing mistake in --host."""
    with pytest.raises(PreflightError, match=r"cannot listen on 192\.0\.2\.1:8080"):
        preflight.check_port(Endpoint("192.0.2.1", 8080))


def test_a_full_disk_is_noticed_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says how much there is and how much is needed."""
    usage = shutil.disk_usage(tmp_path)._replace(free=5 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(PreflightError, match="5 MiB free, 200 MiB are needed"):
        preflight.check_state_dir(StateDir(tmp_path / "state"))


def test_a_state_directory_inside_a_file_is_refused(tmp_path: Path) -> None:
    """Not a stack trace."""
    (tmp_path / "file").write_text("")
    with pytest.raises(PreflightError, match="is not a folder"):
        preflight.check_state_dir(StateDir(tmp_path / "file" / "state"))


def test_a_file_that_an_option_names_must_be_there(tmp_path: Path) -> None:
    """Mistyped, the fleet would come up without what the file says."""
    path = tmp_path / "routes.toml"
    with pytest.raises(PreflightError, match=r"--models: there is no file .*routes\.toml"):
        preflight.check_file(path, "--models")
    path.write_text("version = 1\n")
    preflight.check_file(path, "--models")
    preflight.check_file(None, "--models")


def test_wrong_model_routes_stop_the_start(tmp_path: Path) -> None:
    """A gateway would come up without any route, and say so in its log alone."""
    path = tmp_path / "routes.toml"
    path.write_text("version = 1\n[routes.a]\nmodell = 'm'\n")
    with pytest.raises(PreflightError, match=r"--models: model routes .*: routes\.a\.modell: "):
        preflight.check_model_routes(path)
    path.write_text("version = 1\n[routes.a]\nmodel = 'm'\n")
    preflight.check_model_routes(path)
    preflight.check_model_routes(None)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "is full"),
        (errno.EACCES, "cannot be written to"),
        (errno.EROFS, "cannot be written to"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_explains_errors_of_the_file_system(number: int, words: str) -> None:
    """Words instead of numbers."""
    error = OSError(number, os.strerror(number))
    assert words in preflight.explain_os_error(error, Path("/x"))


def test_a_store_that_does_not_answer_is_named_with_its_setting() -> None:
    """For URLs that the operator gave."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    with pytest.raises(
        PreflightError, match=rf"no Redis answers at 127.0.0.1:{port} .*THE_SETTING"
    ):
        preflight.check_reachable(f"redis://127.0.0.1:{port}/0", "Redis", "THE_SETTING")


def test_a_store_that_listens_passes() -> None:
    """Both as URL and as host:port."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        preflight.check_reachable(f"redis://user:secret@127.0.0.1:{port}/0", "Redis", "X")
        preflight.check_reachable(f"127.0.0.1:{port},other:1", "Kafka", "X")
        preflight.check_reachable(f"127.0.0.1:1,127.0.0.1:{port}", "Kafka", "X")


def test_a_store_behind_a_unix_socket_is_looked_for_there(tmp_path: Path) -> None:
    """All services take such a URL."""
    path = tmp_path / "redis.sock"
    with pytest.raises(PreflightError, match=r"redis\.sock"):
        preflight.check_reachable(f"unix://{path}?db=1", "Redis", "X")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        preflight.check_reachable(f"unix://{path}?db=1", "Redis", "X")


def test_a_password_is_no_part_of_the_message() -> None:
    with pytest.raises(PreflightError) as caught:
        preflight.check_reachable("redis://user:secret@127.0.0.1:1/0", "Redis", "X")
    assert "127.0.0.1:1" in str(caught.value)
    assert "secret" not in str(caught.value)
