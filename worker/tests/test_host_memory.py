"""Tests of how much memory there is for KV."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from headrace_worker.host_memory import free_bytes

MIB = 1 << 20


@pytest.fixture(autouse=True)
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=9000 * MIB))


def write(folder: Path, **files: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_a_containers_limit_counts_if_it_leaves_less(tmp_path: Path) -> None:
    """Files that were read, such as the model, are no use that counts: they can be dropped."""
    statistics = f"anon 1\ninactive_file {200 * MIB}"
    write(
        tmp_path,
        memory__max=str(1000 * MIB),
        memory__current=str(700 * MIB),
        memory__stat=statistics,
    )
    assert free_bytes(tmp_path) == 500 * MIB
    write(tmp_path, memory__current=str(1300 * MIB))
    assert free_bytes(tmp_path) == 0


def test_the_older_control_groups_say_the_same(tmp_path: Path) -> None:
    """Version 1 has other names, and a number too large for any machine where there is no limit."""
    folder = tmp_path / "memory"
    write(
        folder,
        memory__limit_in_bytes=str(1000 * MIB),
        memory__usage_in_bytes=str(600 * MIB),
        memory__stat=f"inactive_file 1\ntotal_inactive_file {100 * MIB}",
    )
    assert free_bytes(tmp_path) == 500 * MIB
    write(folder, memory__limit_in_bytes="9223372036854771712")
    assert free_bytes(tmp_path) == 9000 * MIB


@pytest.mark.parametrize("limit", ["max", None])
def test_without_a_limit_it_is_the_machines(tmp_path: Path, limit: str | None) -> None:
    """On a laptop, or in a container that was given none."""
    if limit:
        write(tmp_path, memory__max=limit, memory__current="5", memory__stat="anon 5")
    assert free_bytes(tmp_path) == 9000 * MIB
