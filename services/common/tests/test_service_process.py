"""What the end of a service's process says."""

from __future__ import annotations

import subprocess
import sys

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
        "from headrace_common.service_process import take_no_arguments\n"
        "from headrace_common.settings import ServiceSettings\n"
        "take_no_arguments('pump', ServiceSettings)\n"
        "print('started')\n"
    )
    program = [sys.executable, "-c", text, argument]
    done = subprocess.run(program, check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == code
    assert "started" not in done.stdout
    assert "headrace-pump" in done.stdout + done.stderr
    assert ("CONFIG.md" in done.stdout) is (code == 0)
