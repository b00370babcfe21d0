"""What the end of a service's process says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from headrace_common.service_process import run_service
from headrace_common.settings import ServiceSettings, SettingsError

class Broken(Exception):
    pass

async def serve(settings):
    {body}

run_service("pump", ServiceSettings(), serve, mistakes=(KeyError,), failures=(Broken,))
"""


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("pass", 0),
        ("raise SettingsError('in its file')", 2),
        ("raise KeyError('in its file')", 2),
        ("raise OSError('in its file')", 1),
        ("raise Broken('in its file')", 1),
    ],
)
def test_the_exit_code_says_whether_to_try_again(body: str, code: int) -> None:
    """And standard error why, in a line without a traceback."""
    program = [sys.executable, "-c", PROGRAM.format(body=body)]
    done = subprocess.run(program, check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert ("pump: " in done.stderr and "in its file" in done.stderr) is bool(code)


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--port", 2), ("serve", 2)])
def test_arguments_are_not_passed_over(argument: str, code: int) -> None:
    """Who asks for help, or believes in an option, does not get a service that has started."""
    text = (
        "from headrace_common.service_process import take_arguments\n"
        "from headrace_common.settings import ServiceSettings\n"
        "take_arguments('pump', ServiceSettings)\n"
        "print('started')\n"
    )
    program = [sys.executable, "-c", text, argument]
    done = subprocess.run(program, check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == code
    assert "started" not in done.stdout
    assert "headrace-pump" in done.stdout + done.stderr
    assert ("CONFIG.md" in done.stdout) is (code == 0)


CHECKS = """
from pathlib import Path
from headrace_common.service_process import CheckedFile, take_arguments
from headrace_common.settings import ServiceSettings, SettingsError, config

class PumpSettings(ServiceSettings):
    prefix = "PUMP_"
    model_config = config("PUMP_")
    rules_file: Path | None = None

def check(path):
    text = "packaged" if path is None else path.read_text()
    if text == "wrong":
        raise SettingsError(f"{path}: wrong")
    return f"found {text}"

take_arguments("pump", PumpSettings, CheckedFile("rules_file", check))
print("started")
"""


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "told"),
    [
        (["--check-config", "good"], {"PUMP_MISSPELT": "1"}, 0, "found right"),
        (["--check-config", "bad"], {}, 2, "headrace-pump: bad: wrong"),
        (["--check-config"], {}, 0, "found packaged"),
        (["--check-config"], {"PUMP_RULES_FILE": "bad"}, 2, "headrace-pump: bad: wrong"),
        (["--check-config"], {"PUMP_MISSPELT": "1"}, 2, "PUMP_MISSPELT"),
        (["--help"], {}, 0, "PUMP_RULES_FILE"),
        ([], {}, 0, "started"),
    ],
)
def test_a_file_of_policy_is_checked_without_a_start(
    arguments: list[str], variables: dict[str, str], code: int, told: str, tmp_path: Path
) -> None:
    """A file that is named needs no settings; without a name the one that is set is checked."""
    (tmp_path / "good").write_text("right")
    (tmp_path / "bad").write_text("wrong")
    done = subprocess.run(
        [sys.executable, "-c", CHECKS, *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
        cwd=tmp_path,
        env=os.environ | variables,
    )
    assert done.returncode == code
    assert told in done.stdout + done.stderr
    assert ("started" in done.stdout) is (not arguments)
