"""The preparation of a model in a process of its own."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace_launcher import model_prepare
from headrace_launcher.model_fetch import ModelError
from headrace_launcher.model_prepare import prepare_model, prepared_path
from headrace_launcher.process import Spawner


@pytest.fixture
def python_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Replaces the worker's preparation by a shell script."""

    def make(script: str) -> None:
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(model_prepare, "sys", SimpleNamespace(executable=str(program)))

    return make


async def prepare(tmp_path: Path) -> list[tuple[float | None, str]]:
    model, reports = tmp_path / "m.gguf", []
    model.write_text("GGUF")
    async with Spawner() as spawner:
        await prepare_model(
            model,
            prepared_path(tmp_path, model),
            tmp_path / "model.log",
            spawner,
            {"PATH": os.defpath},
            lambda ratio, detail: reports.append((ratio, detail)),
        )
    return reports


async def test_passes_on_progress(tmp_path: Path, python_that) -> None:
    """Long phases have a share, short ones words; noise between them is skipped."""
    python_that(
        """echo '{"phase": "tokenizer", "done": 0, "total": 1}'
        echo noise; echo '[1]'; echo '{"phase": 3}'
        echo '{"phase": "weights", "done": 68, "total": 272}'"""
    )
    assert await prepare(tmp_path) == [
        (None, "preparing the tokenizer"),
        (0.25, "preparing the weights"),
    ]


async def test_a_failure_ends_with_the_last_lines(tmp_path: Path, python_that) -> None:
    """What the worker's preparation says on stderr reaches the operator."""
    python_that("echo 'Preparing the model needs 600 MiB' >&2; exit 1")
    with pytest.raises(ModelError, match=r"exit code 1[\s\S]*needs 600 MiB"):
        await prepare(tmp_path)


async def test_a_folder_is_served_as_it_is(tmp_path: Path, python_that) -> None:
    """Hugging Face folders need no preparation."""
    python_that("exit 1")
    assert prepared_path(tmp_path / "cache", tmp_path) == tmp_path
    async with Spawner() as spawner:
        await prepare_model(tmp_path, tmp_path, tmp_path / "l", spawner, {}, lambda *_: None)


def test_another_file_is_prepared_elsewhere(tmp_path: Path) -> None:
    """A file that was replaced is not mistaken for the one before."""
    model = tmp_path / "m.gguf"
    model.write_text("one")
    first = prepared_path(tmp_path, model)
    assert first == prepared_path(tmp_path, model)
    model.write_text("another")
    assert prepared_path(tmp_path, model) != first
