"""Every Triton kernel on a device against its plain-torch twin in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from headrace_worker.gpu.operands import Heads, Random
from headrace_worker.kernels import plan, reference
from headrace_worker.kernels.dispatch import Kernels
from headrace_worker.kernels.plan import Scoring

# Largest error allowed, absolute and relative, by type: inputs are rounded first, so it is that of
# the kernel's own rounding.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
_EPS = 1e-5
_SCORINGS = (Scoring(0.1), Scoring(0.1, 4.0), Scoring(0.1, 0.0, 37), Scoring(0.1, 6.0, 70))


@dataclass(frozen=True)
class Check:
    """Something that must hold.

    Attributes:
        name: says what.
        run: raises AssertionError if it does not hold.
    """

    name: str
    run: Callable[[], None]


def demand(holds: bool, otherwise: str) -> None:
    """Make sure of something.

    Raises:
        AssertionError: it is not so.
    """
    if not holds:
        raise AssertionError(otherwise)


@dataclass(frozen=True)
class KernelSizes:
    """What kernels are checked over.

    Attributes:
        rows: lengths of rows for norms and gates.
        heads: of attention and rotation.
        shapes: batches of (tokens before, new tokens).
        block_size: tokens in a block.
        dtypes: types.
    """

    rows: Sequence[int]
    heads: Sequence[Heads]
    shapes: Sequence[Sequence[tuple[int, int]]]
    block_size: int
    dtypes: Sequence[torch.dtype]


ON_GPU = KernelSizes(
    rows=(1, 8, 96, 576, 640, 4096, 14_336),
    heads=(
        Heads(32, 8, 128),
        Heads(9, 3, 64),
        Heads(4, 1, 256),
        Heads(16, 16, 80),
        Heads(5, 1, 40),
        Heads(24, 2, 96),
        Heads(3, 3, 16),
    ),
    shapes=(
        ((0, 1), (0, 5), (90, 1), (13, 70)),
        ((4000, 1), (1023, 1), (15, 1), (16, 1)),
        ((0, 200), (500, 129), (1, 64), (63, 2), (2000, 1)),
    ),
    block_size=16,
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
)


def kernel_checks(device: torch.device, sizes: KernelSizes, kernels: Kernels) -> Iterator[Check]:
    """Yield all of them."""
    for dtype in sizes.dtypes:
        kind = str(dtype).removeprefix("torch.")
        for size in sizes.rows:
            name = f"norms and gates of {size}, {kind}"
            yield Check(name, partial(_rows, Random(device, dtype), size, kernels))
        for heads in sizes.heads:
            label = f"{heads.num_heads}/{heads.num_kv_heads} heads of {heads.dim}, {kind}"
            yield Check(
                f"rotation and write, {label}", partial(_rope, device, dtype, heads, kernels)
            )
            for scoring in _SCORINGS:
                what = f"cap {scoring.soft_cap:g}, window {scoring.window_tokens}"
                run = partial(_attention, device, dtype, heads, scoring, sizes, kernels)
                yield Check(f"attention, {label}, {what}", run)
        yield Check(f"copies of blocks, {kind}", partial(_copies, Random(device, dtype), kernels))


def _rows(draw: Random, size: int, kernels: Kernels) -> None:
    x, delta = draw.normal(5, size), draw.normal(5, size)
    x[3], delta[3] = 0.0, 0.0
    weight = draw.normal(size)
    _close(kernels.rms_norm(x, weight, _EPS), _norm(x, weight))
    total, normed = kernels.add_rms_norm(x, delta, weight, _EPS)
    demand(torch.equal(total, x + delta), "the sum is not the rounded sum")
    _close(normed, _norm(total, weight))
    heads = draw.normal(3, 7, size)
    _close(kernels.rms_norm(heads[:, 2:5], weight, _EPS), _norm(heads[:, 2:5], weight))
    gate_up = draw.normal(3, 2 * size) * 3
    _close(kernels.silu_mul(gate_up), reference.silu_mul(_exact(gate_up)))
    _close(kernels.gelu_mul(gate_up), reference.gelu_mul(_exact(gate_up)))


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return reference.rms_norm(_exact(x), _exact(weight), _EPS)


def _rope(device: torch.device, dtype: torch.dtype, heads: Heads, kernels: Kernels) -> None:
    draw = Random(device, dtype)
    counts = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    q, k, v = torch.split(draw.normal(3, sum(counts), heads.dim), counts, dim=1)
    angles = draw.normal(3, heads.dim // 2, dtype=torch.float32)
    rope = angles.cos(), angles.sin()
    slots = torch.tensor([5, 19, 0], device=device)
    kv = torch.full((2, 6, 4, heads.num_kv_heads, heads.dim), 7.0, dtype=dtype, device=device)
    expected_kv = _exact(kv)
    there = rope[0].cpu(), rope[1].cpu()
    turned = reference.rope_write_kv(
        _exact(q), _exact(k), _exact(v), there, expected_kv, slots.cpu()
    )
    _close(kernels.rope_write_kv(q, k, v, rope, kv, slots), turned)
    _close(kv, expected_kv)


def _attention(
    device: torch.device,
    dtype: torch.dtype,
    heads: Heads,
    scoring: Scoring,
    sizes: KernelSizes,
    kernels: Kernels,
) -> None:
    for shapes in sizes.shapes:
        given = Random(device, dtype).attention(heads, shapes, sizes.block_size)
        made = kernels.make_plan(given.rows, given.slots, sizes.block_size)
        result = kernels.paged_attention(given.q, given.kv, made, scoring)
        twin = plan.make_plan(given.rows, given.slots.cpu(), sizes.block_size)
        exact = _exact(given.q), _exact(given.kv)
        _close(result, reference.paged_attention(*exact, twin, scoring))


def _copies(draw: Random, kernels: Kernels) -> None:
    source, target = draw.normal(2, 2, 6, 4, 2, 8), draw.normal(2, 2, 9, 4, 2, 8)
    pairs = torch.tensor([[3, 8], [0, 1]], dtype=torch.int32, device=draw.device)
    expected = target.clone()
    reference.copy_blocks(source, expected, pairs)
    kernels.copy_blocks(source, target, pairs)
    demand(torch.equal(target, expected), "blocks differ")


def _exact(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().float()


def _close(result: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[result.dtype]
    torch.testing.assert_close(result.cpu().float(), expected, atol=tolerance, rtol=tolerance)
