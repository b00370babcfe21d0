"""What each kernel is timed on: shapes of a large server, the work in them, the goal.

A goal is the least share of the device's floor, but for sampling: the most passes over the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

import torch

from headrace_worker.gpu import roofline
from headrace_worker.gpu.operands import Heads, Random
from headrace_worker.gpu.roofline import Roofline, Work
from headrace_worker.gpu.timing import Run, Timer
from headrace_worker.kernels.dispatch import Kernels
from headrace_worker.kernels.plan import Scoring
from headrace_worker.kernels.triton import backend, sampler
from headrace_worker.kernels.triton.sampling import draw, penalise, restore
from headrace_worker.kernels.triton.tuning import Tuning
from headrace_worker.sampling import SampleSpec

_EPS = 1e-5
_BLOCK_SIZE = 16
_MAX_PASSES = 4.0


@dataclass(frozen=True)
class KernelCase:
    """One timing.

    Attributes:
        name: in the report.
        kernel: in a table of cuts; empty = it has none.
        size: likewise.
        work: what is done.
        prepare: makes the inputs on a device and returns what runs with kernels.
        least_ratio: goal; 0 = it is told in passes.
        max_passes: goal where the time is told in passes over the logits.
    """

    name: str
    kernel: str
    size: int
    work: Work
    prepare: Callable[[torch.device], Callable[[Kernels], Run]]
    least_ratio: float = 0.0
    max_passes: float = 0.0


@dataclass(frozen=True)
class KernelTime:
    """One row of the report."""

    name: str
    duration_s: float
    floor_s: float
    ratio: float
    goal: str
    is_reached: bool


@dataclass(frozen=True)
class BenchSizes:
    """How large; the defaults are those of Llama 3 8B on a large device.

    Attributes:
        decode: (rows, context) of decode attention.
        prefill: (new tokens, context) of prefill attention.
        num_tokens: of norms, rotation and gates.
        num_blocks: copied.
        logits: (rows, vocabulary).
    """

    heads: Heads = field(default_factory=lambda: Heads(32, 8, 128))
    decode: Sequence[tuple[int, int]] = ((64, 4096), (8, 8192), (1, 32_768))
    prefill: Sequence[tuple[int, int]] = ((8192, 8192), (512, 8192))
    num_tokens: int = 8192
    hidden_size: int = 4096
    ffn_size: int = 14_336
    num_blocks: int = 2048
    logits: tuple[int, int] = (64, 128_256)


def kernel_cases(sizes: BenchSizes) -> Iterator[KernelCase]:
    """Yield all of them."""
    heads, tokens = sizes.heads, sizes.num_tokens
    sizes_of_heads = heads.num_heads, heads.num_kv_heads, heads.dim
    for rows, context in sizes.decode:
        work = roofline.decode_attention([context] * rows, *sizes_of_heads)
        name = f"decode attention {rows} x {context}"
        prepare = partial(_attention, heads, [(context - 1, 1)] * rows)
        yield KernelCase(name, "paged_decode", heads.dim, work, prepare, 0.8)
    for num_new, context in sizes.prefill:
        work = roofline.prefill_attention(num_new, context, *sizes_of_heads)
        name = f"prefill attention {num_new} of {context}"
        prepare = partial(_attention, heads, [(context - num_new, num_new)])
        yield KernelCase(name, "paged_prefill", heads.dim, work, prepare, 0.55)
    size = sizes.hidden_size
    work = roofline.add_rms_norm(tokens, size)
    prepare = partial(_norm, tokens, size)
    yield KernelCase(f"add + norm {tokens} x {size}", "rms_norm", size, work, prepare, 0.85)
    work = roofline.rope_write_kv(tokens, *sizes_of_heads)
    prepare = partial(_rope, tokens, heads)
    yield KernelCase(
        f"rotation + KV write {tokens}", "rope_write_kv", heads.dim, work, prepare, 0.85
    )
    size = sizes.ffn_size
    work = roofline.gate(tokens, size)
    yield KernelCase(
        f"gate {tokens} x {size}", "gated", size, work, partial(_gate, tokens, size), 0.85
    )
    values = _BLOCK_SIZE * heads.num_kv_heads * heads.dim
    work = roofline.copy(roofline.BF16_BYTES * 2 * values * sizes.num_blocks)
    prepare = partial(_copy, sizes.num_blocks, heads)
    yield KernelCase(
        f"copy of {sizes.num_blocks} blocks", "copy_blocks", values, work, prepare, 0.8
    )
    yield from _sampling_cases(*sizes.logits)


def _sampling_cases(num_rows: int, vocab: int) -> Iterator[KernelCase]:
    kinds = {
        "greedy": SampleSpec(),
        "temperature": SampleSpec(temperature=0.8),
        "top-k, top-p, min-p": SampleSpec(temperature=0.8, top_k=50, top_p=0.95, min_p=0.01),
        "top-p and penalties": SampleSpec(
            temperature=0.8,
            top_p=0.9,
            repetition_penalty=1.1,
            prompt_counts=dict.fromkeys(range(0, min(vocab, 4000), 2), 1),
        ),
    }
    for name, spec in kinds.items():
        specs = [spec] * num_rows
        yield KernelCase(
            f"sampling {num_rows} x {vocab}, {name}",
            "",
            vocab,
            roofline.one_pass(num_rows, vocab),
            partial(_sample, specs, vocab),
            max_passes=_MAX_PASSES,
        )


def timed(
    case: KernelCase, timer: Timer, limits: Roofline, tuning: Tuning, device: torch.device
) -> KernelTime:
    """Time a case."""
    duration_s = timer(case.prepare(device)(backend.kernels(Kernels, tuning)))
    ratio = limits.ratio(case.work, duration_s)
    if case.max_passes:
        is_reached, goal = 1 / ratio <= case.max_passes, f"<= {case.max_passes:g} passes"
    else:
        is_reached, goal = ratio >= case.least_ratio, f">= {case.least_ratio:.0%}"
    return KernelTime(case.name, duration_s, limits.floor_s(case.work), ratio, goal, is_reached)


def best_cut(
    case: KernelCase, candidates: Sequence[dict[str, int]], timer: Timer, device: torch.device
) -> tuple[dict[str, int] | None, float]:
    """Time a case with every cut; return the best and its time. None = none can be launched."""
    launch = case.prepare(device)
    best: tuple[dict[str, int] | None, float] = None, inf
    for cut in candidates:
        tuning = Tuning({case.kernel: {str(case.size): cut}})
        try:
            duration_s = timer(launch(backend.kernels(Kernels, tuning)))
        except RuntimeError:
            # Too much shared memory or too many registers for this device.
            continue
        if duration_s < best[1]:
            best = cut, duration_s
    return best


def _attention(
    heads: Heads, shapes: Sequence[tuple[int, int]], device: torch.device
) -> Callable[[Kernels], Run]:
    given = Random(device, torch.bfloat16).attention(heads, shapes, _BLOCK_SIZE)
    plan = backend.make_plan(given.rows, given.slots, _BLOCK_SIZE)
    scoring = Scoring(heads.dim**-0.5)
    return lambda kernels: partial(kernels.paged_attention, given.q, given.kv, plan, scoring)


def _norm(num_tokens: int, size: int, device: torch.device) -> Callable[[Kernels], Run]:
    draw_from = Random(device, torch.bfloat16)
    x, delta = draw_from.normal(num_tokens, size), draw_from.normal(num_tokens, size)
    weight = draw_from.normal(size)
    return lambda kernels: partial(kernels.add_rms_norm, x, delta, weight, _EPS)


def _rope(num_tokens: int, heads: Heads, device: torch.device) -> Callable[[Kernels], Run]:
    draw_from = Random(device, torch.bfloat16)
    counts = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    q, k, v = torch.split(draw_from.normal(num_tokens, sum(counts), heads.dim), counts, dim=1)
    angles = draw_from.normal(num_tokens, heads.dim // 2, dtype=torch.float32)
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    kv = draw_from.normal(2, num_blocks, _BLOCK_SIZE, heads.num_kv_heads, heads.dim)
    slots = torch.randperm(num_blocks * _BLOCK_SIZE)[:num_tokens].to(device)
    rope = angles.cos(), angles.sin()
    return lambda kernels: partial(kernels.rope_write_kv, q, k, v, rope, kv, slots)


def _gate(num_tokens: int, size: int, device: torch.device) -> Callable[[Kernels], Run]:
    gate_up = Random(device, torch.bfloat16).normal(num_tokens, 2 * size)
    return lambda kernels: partial(kernels.silu_mul, gate_up)


def _copy(num_blocks: int, heads: Heads, device: torch.device) -> Callable[[Kernels], Run]:
    shape = (1, 2, 2 * num_blocks, _BLOCK_SIZE, heads.num_kv_heads, heads.dim)
    pool = Random(device, torch.bfloat16).normal(*shape)
    ids = torch.randperm(2 * num_blocks).to(device, torch.int32)
    pairs = ids.view(2, -1).t().contiguous()
    return lambda kernels: partial(kernels.copy_blocks, pool, pool, pairs)


def _sample(
    specs: Sequence[SampleSpec], vocab: int, device: torch.device
) -> Callable[[Kernels], Run]:
    logits = 3 * Random(device, torch.float32).normal(len(specs), vocab)
    rows = sampler.draw_rows(specs, device)
    entries = sampler.penalties(specs, [None] * len(specs), vocab, device)

    def run() -> None:
        kept = None if entries is None else penalise(logits, entries)
        draw(logits, rows)
        if entries is not None and kept is not None:
            restore(logits, entries, kept)

    return lambda _: run
