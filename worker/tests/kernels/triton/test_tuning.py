"""How kernels are cut for a device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace_worker.kernels.triton import tuning
from headrace_worker.kernels.triton.tuning import DEFAULTS, UNTUNED, Tuning

HALF, FULL = torch.bfloat16, torch.float32


def test_a_table_comes_back_as_written(tmp_path: Path) -> None:
    """Written, read, and found by kernel and size for 16-bit values only."""
    cut = {"TILE": 128, "num_warps": 8, "num_stages": 4}
    path = tuning.table_path("NVIDIA H200 (141 GB)", tmp_path / "tables")
    assert path.name == "nvidia-h200-141-gb.json"
    tuning.write(path, Tuning({"paged_decode": {"128": cut}}))
    read = tuning.read(path)
    assert read.cut("paged_decode", 128, HALF) == cut
    assert read.cut("paged_decode", 64, HALF) == DEFAULTS["paged_decode"]
    assert read.cut("paged_decode", 128, FULL) != cut
    assert read.cut("gated", 128, HALF) == DEFAULTS["gated"]


@pytest.mark.parametrize(
    "cuts",
    [
        {"paged_decode": {"128": {"TILE": 64, "num_warps": 4}}},
        {"paged_decode": {"128": {"TILE": 64, "num_warps": 4, "num_stages": 3, "GROUP": 1}}},
        {"no_such_kernel": {"128": {"TILE": 64}}},
    ],
    ids=["too little", "too much", "unknown"],
)
def test_a_table_that_no_kernel_takes_is_refused(cuts) -> None:
    """A launch would fail later, far from the file at fault."""
    with pytest.raises(ValueError, match="is not cut by"):
        Tuning(cuts)


def test_every_committed_table_is_one() -> None:
    """What lies in the folder can be read, and is named as its device would be looked for."""
    for path in tuning.FOLDER.glob("*.json"):
        tuning.read(path)
        assert tuning.table_path(path.stem).name == path.name


def test_without_a_gpu_nothing_is_tuned() -> None:
    """The interpreter cuts as an unknown device does."""
    assert tuning.tuning_of(torch.device("cpu")) is UNTUNED


def test_wide_heads_and_float32_are_cut_smaller() -> None:
    """Tiles have to fit into registers and shared memory there."""
    wide = UNTUNED.cut("paged_prefill", 256, HALF)
    assert wide["TILE_N"] < UNTUNED.cut("paged_prefill", 128, HALF)["TILE_N"]
    exact = UNTUNED.cut("paged_decode", 128, FULL)
    assert exact["TILE"] < UNTUNED.cut("paged_decode", 128, HALF)["TILE"]
