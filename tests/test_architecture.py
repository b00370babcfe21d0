"""Rules about the shape of the tree that no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BANNED = {"utils", "helpers", "misc", "manager", "common"}
SERVICES = (
    "gateway",
    "router",
    "cache-index",
    "guard",
    "worker",
    "services/ratelimit",
    "services/billing",
    "services/launcher",
)
FILES = [
    path
    for service in (*SERVICES, "services/common")
    for path in (ROOT / service / "src").rglob("*.py")
]
# Words that would tie the project to one machine or to how it was written.
FOREIGN = re.compile(r"/work/|/opt/pypi|/root/")


def _too_long(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT)
    found = [f"{name}: {n} lines"] if (n := text.count("\n")) > 600 else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # A kernel's parameters take a line each; what is read as one piece is its body.
            lines = (node.end_lineno or node.lineno) - node.body[0].lineno + 1
            if lines > 60:
                found.append(f"{name}:{node.lineno} {node.name}: {lines} lines")
    return found


def test_modules_and_functions_stay_small() -> None:
    """No module above 600 lines, no function's body above 60."""
    assert [line for path in FILES for line in _too_long(path)] == []


def test_long_modules_say_why() -> None:
    """A module above 400 lines explains itself in its docstring."""
    silent = [
        str(path.relative_to(ROOT))
        for path in FILES
        if (text := path.read_text(encoding="utf-8")).count("\n") > 400
        and "long because" not in (ast.get_docstring(ast.parse(text)) or "").lower()
    ]
    assert silent == []


def test_no_grab_bag_modules() -> None:
    """Every module is named by what it holds."""
    assert [p for p in FILES if p.stem in BANNED] == []


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_has_its_standard_files(service: str) -> None:
    """A reader finds the same entry points in each service."""
    folder = ROOT / service
    (package,) = (folder / "src").glob("headrace_*")
    wanted = [package / n for n in ("__init__.py", "__main__.py", "settings.py", "py.typed")]
    wanted += [folder / "README.md", folder / "tests"]
    if service != "services/launcher":
        wanted += [folder / "Dockerfile", package / "metrics.py"]
    assert [str(p.relative_to(ROOT)) for p in wanted if not p.exists()] == []


def test_no_function_level_imports_of_our_own_packages() -> None:
    """The import graph has no cycles that a late import would hide."""
    late = []
    for path in FILES:
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            late += [
                f"{path.relative_to(ROOT)}:{node.lineno}"
                for node in ast.walk(function)
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headrace_")
            ]
    assert late == []


def test_nothing_names_the_machine_it_was_written_on() -> None:
    """No tracked text file holds a path of one machine."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path == Path(__file__) or not path.is_file():
            continue
        data = path.read_bytes()
        if b"\0" not in data[:8192] and FOREIGN.search(data.decode("utf-8", "replace")):
            found.append(name)
    assert found == []


def test_decisions_have_numbers_of_their_own() -> None:
    """Two ADRs that were written side by side do not share a number, and titles agree."""
    records = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
    numbers = [path.name[:4] for path in records]
    assert records
    assert len(numbers) == len(set(numbers))
    titles = [path.read_text(encoding="utf-8")[:7] for path in records]
    assert titles == [f"# {number} " for number in numbers]


def test_text_files_have_no_crlf() -> None:
    """One line ending."""
    assert [p for p in FILES if b"\r\n" in p.read_bytes()] == []
