"""Finds how kernels are best cut for a device, by trying."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import torch

from headrace_worker.gpu.kernel_bench import KernelCase, best_cut
from headrace_worker.gpu.timing import Timer
from headrace_worker.kernels.triton.tuning import Tuning, default_cut

_CHOICES: dict[str, dict[str, Sequence[int]]] = {
    "paged_decode": {"TILE": (32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (2, 3, 4)},
    "paged_prefill": {
        "TILE_M": (64, 128),
        "TILE_N": (32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4),
    },
    "rms_norm": {"num_warps": (2, 4, 8, 16)},
    "gated": {"BLOCK": (512, 1024, 2048, 4096), "num_warps": (4, 8)},
    "rope_write_kv": {"HEADS": (2, 4, 8, 16, 32), "num_warps": (1, 2, 4, 8)},
    "copy_blocks": {"BLOCK": (1024, 2048, 4096, 8192), "num_warps": (4, 8)},
}


def candidates(kernel: str, size: int) -> Iterator[dict[str, int]]:
    """Yield the cuts that are tried, the default first: it wins where nothing is better."""
    first = dict(default_cut(kernel, size))
    yield first
    choices = _CHOICES[kernel]
    for values in product(*choices.values()):
        cut = dict(zip(choices, values, strict=True))
        if cut != first:
            yield cut


def tuned(cases: Sequence[KernelCase], timer: Timer, device: torch.device) -> Tuning:
    """Return the best cut of each kernel and size, by the first case that has them."""
    cuts: dict[str, dict[str, dict[str, int]]] = {}
    for case in cases:
        if not case.kernel or str(case.size) in cuts.get(case.kernel, {}):
            continue
        cut, _ = best_cut(case, [*candidates(case.kernel, case.size)], timer, device)
        if cut is not None:
            cuts.setdefault(case.kernel, {})[str(case.size)] = cut
    return Tuning(cuts)
