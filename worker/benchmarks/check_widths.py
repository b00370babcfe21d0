"""Do the kernels give the same bits for every instruction set that this machine runs?

``python worker/benchmarks/check_widths.py`` compiles them for older machines beside this one's own
build, computes products of all kinds of matrices, attention, gates and draws with each, and prints
how many results differ. Exit code 1 = some do.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from headrace_worker.kernels import compiler
from headrace_worker.kernels.blocks import KIND_F32, BlockMatrix, from_float
from headrace_worker.kernels.draws import Draw
from headrace_worker.kernels.native import NativeKernels
from headrace_worker.kernels.native_types import TokenPlan
from headrace_worker.kernels.plan import Scoring
from headrace_worker.kernels.rounding import Rounding

# Name, compiler's name of the machine, and the features (of /proc/cpuinfo) that it takes.
_OTHERS = (
    ("AVX2 + FMA", "haswell", {"avx2", "fma"}),
    ("AVX-VNNI", "alderlake", {"avx_vnni"}),
    ("AVX-512 BW", "skylake-avx512", {"avx512bw", "avx512dq", "avx512vl"}),
)
_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 25, 130)


def main() -> int:
    """Compare; see the module."""
    own = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    num_bad = 0
    with tempfile.TemporaryDirectory() as folder:
        expected = list(_results(_built("native", Path(folder))))
        for name, machine, features in _OTHERS:
            if not features <= set(own):
                sys.stdout.write(f"{name}: not on this machine\n")
                continue
            found = list(_results(_built(machine, Path(folder))))
            pairs = zip(expected, found, strict=True)
            differing = sum(not torch.equal(a, b) for a, b in pairs)
            sys.stdout.write(f"{name}: {differing} of {len(found)} results differ\n")
            num_bad += differing
    return int(num_bad > 0)


def _built(machine: str, folder: Path) -> NativeKernels:
    flags = compiler.FLAGS
    compiler.FLAGS = tuple(
        f"-march={machine}" if flag.startswith("-march") else flag for flag in flags
    )
    try:
        return NativeKernels(compiler.ensure_compiled(folder), num_threads=2)
    finally:
        compiler.FLAGS = flags


def _results(kernels: NativeKernels) -> Iterator[torch.Tensor]:
    """Compute the same inputs whatever the kernels."""
    generator = torch.Generator().manual_seed(0)
    for weight in _matrices(generator):
        for rounding in Rounding if weight.kind != KIND_F32 else (Rounding.FLOAT32,):
            for num_rows in _ROWS:
                x = torch.randn(num_rows, weight.num_in, generator=generator)
                yield kernels.linear(x, weight, rounding)
    kv = torch.randn(2, 40, 16, 3, 64, generator=generator)
    for num_tokens, context in ((1, 77), (30, 500), (200, 200)):
        q = torch.randn(num_tokens, 9, 64, generator=generator)
        zeros = torch.zeros(num_tokens, dtype=torch.int64)
        seen = torch.arange(context - num_tokens + 1, context + 1)
        yield kernels.attention(
            q, kv, TokenPlan(zeros, torch.arange(40), zeros, seen), Scoring(0.1)
        )
    x = torch.randn(3, 2 * 104, generator=generator)
    yield kernels.silu_mul(x)
    yield kernels.gelu_mul(x)
    logits = torch.randn(4, 5003, generator=generator) * 4
    draws = [Draw(row, 0.8, 0.95, 0.0, 0, i / 50) for row in range(4) for i in range(50)]
    yield torch.tensor(kernels.draw(logits, draws))


def _matrices(generator: torch.Generator) -> list[BlockMatrix]:
    """Make a matrix of each kind, (149, 96), with scales and weights at random."""
    scales = torch.rand(149, 3, 2, generator=generator).view(torch.uint8)
    values = torch.randint(0, 256, (149, 3, 32), generator=generator, dtype=torch.uint8)
    blocks = (
        torch.cat((scales, values[..., :16]), dim=-1),
        torch.cat((scales[..., :4], values), dim=-1),
        torch.cat((scales, values), dim=-1),
    )
    floats = torch.randn(149, 96, generator=generator)
    return [from_float(floats), *(BlockMatrix(each.reshape(149, -1), 96) for each in blocks)]


if __name__ == "__main__":
    sys.exit(main())
