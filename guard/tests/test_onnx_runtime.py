"""Tests of what the guard's process does not do behind its operator's back."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "headrace_guard"


def test_the_library_of_the_embedding_keeps_no_device_id_and_reports_to_nobody(
    tmp_path: Path,
) -> None:
    """By itself onnxruntime leaves both in the home folder as soon as it is imported."""
    code = "import headrace_guard.classifiers.embedding"
    environment = {"HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.rglob("*")) == []


def test_it_is_imported_in_one_place() -> None:
    """Anywhere else might come first."""
    importers = [
        path.name
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Import) and any(it.name == "onnxruntime" for it in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module == "onnxruntime")
    ]
    assert importers == ["onnx_runtime.py"]
