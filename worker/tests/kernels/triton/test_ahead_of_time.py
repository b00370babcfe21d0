"""The kernels compile for real devices, and what they need there does not grow unnoticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from headrace_worker.kernels.triton.ahead_of_time import TABLE, TARGETS, problems, variants

FINE = {"registers": 64, "spill_bytes": 0, "shared_bytes": 2048}


@pytest.mark.timeout(900)
def test_every_kernel_compiles_within_its_table() -> None:
    """In a process of its own, since the interpreter is chosen for this one."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "headrace_worker.kernels.triton.ahead_of_time"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_table_has_every_kernel() -> None:
    """One entry per kernel variant and kind of device, and no spill."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    names = {f"{variant.name} sm_{capability}" for variant in variants() for capability in TARGETS}
    assert table.keys() == names
    assert not any(figures["spill_bytes"] for figures in table.values())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"registers": 60}, []),
        ({"registers": 65}, ["registers grew from 64 to 65"]),
        ({"spill_bytes": 8}, ["spills 8 bytes"]),
        (
            {"shared_bytes": 4096},
            ["needs 4096 bytes of shared memory of 3000", "shared_bytes grew"],
        ),
    ],
)
def test_growth_and_spills_are_said(changes: dict[str, int], said: list[str]) -> None:
    """Fewer registers are fine; everything else that changed for the worse is named."""
    found = problems(FINE | changes, FINE, limit_bytes=3000)
    assert len(found) == len(said)
    assert all(text.startswith(begin) for text, begin in zip(found, said, strict=True))


def test_an_unknown_kernel_is_said() -> None:
    """A new variant has to be put into the table."""
    assert problems(FINE, None, 3000) == ["is not in the table"]
