"""How each kernel is cut for a device: tile sizes, warps, stages.

``tuning/<device>.json`` holds what ``make gpu-bench ARGS=--tune`` found best on a device, by kernel
and size; what it does not name, and devices without a file, get `DEFAULTS`. A size is the head size
for attention and rotation, the length of a row for norms and gates, the values of one block for
copies. Tables are of 16-bit values: float32 tiles need twice the memory, so they keep the defaults.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

Cut = Mapping[str, int]

FOLDER = Path(__file__).with_name("tuning")
DEFAULTS: Mapping[str, Cut] = {
    "paged_decode": {"TILE": 64, "num_warps": 4, "num_stages": 3},
    "paged_prefill": {"TILE_M": 64, "TILE_N": 64, "num_warps": 4, "num_stages": 3},
    "rms_norm": {"num_warps": 4},
    "gated": {"BLOCK": 1024, "num_warps": 4},
    "rope_write_kv": {"HEADS": 8, "num_warps": 4},
    "copy_blocks": {"BLOCK": 2048, "num_warps": 4},
}
# Where these would not fit: tiles of wide heads into registers, of float32 into shared memory.
_WIDE = 256
_WIDE_DEFAULTS: Mapping[str, Cut] = {
    "paged_decode": {"TILE": 32, "num_warps": 4, "num_stages": 3},
    "paged_prefill": {"TILE_M": 64, "TILE_N": 32, "num_warps": 8, "num_stages": 2},
}
_FLOAT32_DEFAULTS: Mapping[str, Cut] = {
    "paged_decode": {"TILE": 16, "num_warps": 4, "num_stages": 2},
    "paged_prefill": {"TILE_M": 32, "TILE_N": 16, "num_warps": 8, "num_stages": 1},
}
_WIDE_FLOAT32_DEFAULTS: Mapping[str, Cut] = {
    "paged_prefill": {"TILE_M": 16, "TILE_N": 16, "num_warps": 16, "num_stages": 1},
}
_TUNED_ITEM_BYTES = 2


@dataclass(frozen=True)
class Tuning:
    """The cuts of one device.

    Attributes:
        cuts: by kernel and size, as in the file.
    """

    cuts: Mapping[str, Mapping[str, Cut]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kernel, by_size in self.cuts.items():
            for size, cut in by_size.items():
                if cut.keys() != DEFAULTS.get(kernel, {}).keys():
                    raise ValueError(f"{kernel} of size {size} is not cut by {sorted(cut)}")

    def cut(self, kernel: str, size: int, dtype: torch.dtype) -> Cut:
        """Return the compile-time arguments and options of a launch."""
        if dtype.itemsize != _TUNED_ITEM_BYTES:
            wide = _WIDE_FLOAT32_DEFAULTS.get(kernel) if size >= _WIDE else None
            return wide or _FLOAT32_DEFAULTS.get(kernel) or DEFAULTS[kernel]
        tuned = self.cuts.get(kernel, {}).get(str(size))
        return tuned or default_cut(kernel, size)


def default_cut(kernel: str, size: int) -> Cut:
    """How a kernel over 16-bit values is cut for a device that nobody tuned it for."""
    wide = _WIDE_DEFAULTS.get(kernel) if size >= _WIDE else None
    return wide or DEFAULTS[kernel]


UNTUNED = Tuning()


def tuning_of(device: torch.device, folder: Path = FOLDER) -> Tuning:
    """Read the table of a device; the defaults where there is none.

    Raises:
        ValueError: the table is not one.
    """
    if device.type != "cuda":
        return UNTUNED
    path = table_path(torch.cuda.get_device_name(device), folder)
    return read(path) if path.exists() else UNTUNED


def table_path(device_name: str, folder: Path = FOLDER) -> Path:
    """Where the table of a device lies, whether there is one or not."""
    return folder / (re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") + ".json")


def read(path: Path) -> Tuning:
    """Read a table.

    Raises:
        ValueError: it is not one.
    """
    return Tuning(json.loads(path.read_text(encoding="utf-8")))


def write(path: Path, tuning: Tuning) -> None:
    """Write a table, sorted, so that a change shows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tuning.cuts, indent=1, sort_keys=True) + "\n", encoding="utf-8")
