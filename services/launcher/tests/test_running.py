"""`headrace status` and `down` over folders in a bad state."""

from pathlib import Path

import pytest

from headrace_launcher.cli import run
from headrace_launcher.exit_codes import EXIT_FAILED, EXIT_NOT_RUNNING, EXIT_OK
from headrace_launcher.state_dir import StateDir

DAMAGED = [b"", b"{", b"[]", b"null", b'{"version": 99}', b"\xff\xfe"]


@pytest.mark.parametrize("content", DAMAGED)
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_status_of_a_damaged_view_is_words(
    state_dir: StateDir, content: bytes, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Told once, and nothing is called running."""
    state_dir.fleet_json.write_bytes(content)
    code = run(["status", "--state-dir", str(state_dir.path), *options])
    assert code == EXIT_NOT_RUNNING
    assert str(state_dir.fleet_json) in capsys.readouterr().err


@pytest.mark.parametrize("content", DAMAGED)
def test_down_with_a_damaged_view_is_a_failure(state_dir: StateDir, content: bytes) -> None:
    """A fleet may well run: "nothing to stop" would be a guess."""
    state_dir.fleet_json.write_bytes(content)
    assert run(["down", "--state-dir", str(state_dir.path)]) == EXIT_FAILED


def test_a_file_in_place_of_the_folder_holds_no_fleet(tmp_path: Path) -> None:
    """Never a stack trace."""
    (tmp_path / "file").touch()
    where = ["--state-dir", str(tmp_path / "file")]
    assert run(["status", *where]) == EXIT_NOT_RUNNING
    assert run(["status", "--prometheus", *where]) == EXIT_NOT_RUNNING
    assert run(["down", *where]) == EXIT_OK
    assert run(["keys", "list", *where]) == EXIT_NOT_RUNNING


@pytest.mark.parametrize(
    "limit",
    [
        ["--budget-usd", "1e400"],
        ["--budget-usd", "99999999999"],
        ["--max-concurrent", "9" * 21],
        ["--tokens-per-minute", "9" * 21],
    ],
)
def test_limits_beyond_all_bounds_are_wrong_options(limit: list[str]) -> None:
    """No field of the contract holds them."""
    with pytest.raises(SystemExit, match="2"):
        run(["keys", "create", "--tenant", "t", "--name", "n", *limit])
