"""The C kernels behind the signatures of their twins in `kernels.reference`.

All calls release the interpreter lock. Tensors are float32, contiguous where not said otherwise.
One object is used from one thread; it has compute threads of its own.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from headrace_common.errors import Unavailable
from headrace_worker.kernels import reference
from headrace_worker.kernels.blocks import KIND_F32, BlockMatrix, from_float
from headrace_worker.kernels.cores import Seat
from headrace_worker.kernels.draws import Draw
from headrace_worker.kernels.native_types import (
    I64,
    PTR,
    CDraw,
    HeadShape,
    PanelMatrix,
    TokenPlan,
    key_panels,
    kv_view_of,
    matrix_of,
    pointer,
    scoring_of,
)
from headrace_worker.kernels.plan import PlacedRow, Scoring, make_plan
from headrace_worker.kernels.rounding import Rounding

_RESULTS = {
    "context_start": PTR,
    "context_stop": None,
    "panel_bytes": I64,
    "pack": None,
    "step": I64,
    "linear": I64,
    "attention": I64,
    "draw": I64,
    "rms_norm": None,
    "silu_mul": None,
    "gelu_mul": None,
    "rope": None,
    "write_keys": None,
    "write_values": None,
}
# Rows of the load-time check: every tile of every kernel takes part.
_CHECKED_ROWS = (1, 2, 3, 5, 8, 13)
# Errors relative to the largest value: what the order of summation may do, and no more.
_TOLERANCE = 1e-5


class NativeKernels:
    """The loaded library and the threads that it computes with."""

    def __init__(self, library: Path, num_threads: int = 1, seat: Seat | None = None) -> None:
        """Load it and try it out.

        Args:
            library: the compiled kernels.
            num_threads: threads at most.
            seat: among the workers that share the cores; None = this one has them for itself.

        Raises:
            Unavailable: it cannot be loaded, or computes something else than it should.
        """
        try:
            self.library = ctypes.CDLL(str(library))
        except OSError as error:
            raise Unavailable(f"the compiled kernels cannot be loaded: {error}") from error
        for name, result in _RESULTS.items():
            getattr(self.library, f"hr_{name}").restype = result
        place = (
            (seat.stamps, I64(seat.number), I64(seat.num_cores)) if seat else (None, I64(), I64())
        )
        started = self.library.hr_context_start(I64(num_threads), *place)
        if not started:
            raise Unavailable("no memory for compute threads")
        self.context = PTR(started)
        # With the seat, whose memory the context's last act is to write to.
        stop = self.library.hr_context_stop
        self._stop = weakref.finalize(
            self, lambda context, _seat: stop(context), self.context, seat
        )
        # A thread that nobody could wait for may still compute when the process ends.
        self._stop.atexit = False
        self._check()

    def pack(self, weight: BlockMatrix) -> PanelMatrix:
        """Copy a matrix into panels."""
        matrix = matrix_of(weight)
        num_bytes = self.library.hr_panel_bytes(ctypes.byref(matrix))
        panels = torch.empty(num_bytes, dtype=torch.uint8)
        self.library.hr_pack(ctypes.byref(matrix), pointer(panels))
        return PanelMatrix(panels, weight.kind, weight.num_out, weight.num_in)

    def linear(
        self,
        x: torch.Tensor,
        weight: BlockMatrix | PanelMatrix,
        rounding: Rounding = Rounding.FLOAT32,
    ) -> torch.Tensor:
        """Return x W^T; x: (T, in). See `reference.rounded_linear`."""
        y = torch.empty(len(x), weight.num_out)
        panels = self.pack(weight) if isinstance(weight, BlockMatrix) else weight
        matrix = matrix_of(panels)
        sizes = I64(len(x)), I64(rounding)
        run = self.library.hr_linear
        _done(run(self.context, pointer(x), ctypes.byref(matrix), pointer(y), *sizes))
        return y

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `reference.rms_norm`."""
        y = torch.empty_like(x)
        rows, size = map(I64, x.shape)
        self.library.hr_rms_norm(
            pointer(x), pointer(weight), pointer(y), rows, size, ctypes.c_float(eps)
        )
        return y

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `reference.silu_mul`."""
        return self._gated(self.library.hr_silu_mul, gate_up)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `reference.gelu_mul`."""
        return self._gated(self.library.hr_gelu_mul, gate_up)

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """See `reference.apply_rope`; cos and sin are (T, D/2)."""
        y = x.clone()
        rows, heads, dim = x.shape
        sizes = map(I64, (rows, heads * dim, heads, dim))
        self.library.hr_rope(pointer(y), pointer(cos), pointer(sin), *sizes)
        return y

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, plan: TokenPlan) -> None:
        """See `reference.write_kv`; the pool's keys lie as `key_panels` has them."""
        heads = k.shape[1]
        shape = HeadShape(0, *k.shape[1:])
        view, stride = kv_view_of(kv, plan), I64(heads * k.shape[2])
        places = stride, ctypes.byref(view), I64(len(k)), ctypes.byref(shape)
        self.library.hr_write_keys(pointer(k), *places, I64(0), I64(heads))
        self.library.hr_write_values(pointer(v), *places)

    def attention(
        self, q: torch.Tensor, kv: torch.Tensor, plan: TokenPlan, scoring: Scoring
    ) -> torch.Tensor:
        """See `reference.paged_attention`; here each token has a table and context of its own.

        The pool's keys lie as `key_panels` has them.
        """
        rows, num_heads, head_dim = q.shape
        y = torch.empty_like(q)
        shape = HeadShape(num_heads, kv.shape[3], head_dim)
        view, how, run = kv_view_of(kv, plan), scoring_of(scoring), self.library.hr_attention
        structures = ctypes.byref(view), I64(rows), ctypes.byref(shape), ctypes.byref(how)
        _done(run(self.context, pointer(q), pointer(y), *structures))
        return y

    def draw(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
        """Draw tokens; logits: (R, V). See `sampling.drawn` for what it is the twin of."""
        ways = (CDraw * len(draws))(*(CDraw(*each[1:], each.row) for each in draws))
        tokens = (I64 * len(draws))()
        sizes = I64(logits.shape[1]), ways, I64(len(draws))
        _done(self.library.hr_draw(self.context, pointer(logits), *sizes, tokens))
        return list(tokens)

    def _gated(
        self, operation: Any, gate_up: torch.Tensor
    ) -> torch.Tensor:  # Any: foreign function
        y = torch.empty(len(gate_up), gate_up.shape[1] // 2)
        operation(pointer(gate_up), pointer(y), *map(I64, y.shape))
        return y

    def _check(self) -> None:
        """Compare the products and the attention, which differ by machine, with their twins."""
        generator = torch.Generator().manual_seed(0)
        for weight in _samples(generator):
            panels = self.pack(weight)
            for rounding in Rounding if weight.kind != KIND_F32 else (Rounding.FLOAT32,):
                for num_rows in _CHECKED_ROWS:
                    x = torch.randn(num_rows, weight.num_in, generator=generator)
                    expected = reference.rounded_linear(x, weight, rounding)
                    result = self.linear(x, panels, rounding)
                    if not _agree(result, expected):
                        raise Unavailable(
                            f"the compiled kernels fail their check (kind {weight.kind}, "
                            f"{rounding.name.lower()})"
                        )
        for result, expected in self._attention_samples(generator):
            if not _agree(result, expected):
                raise Unavailable("the compiled kernels fail their check (attention)")

    def _attention_samples(
        self, generator: torch.Generator
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Compute the last 11 of 133 tokens of one row, and their twins."""
        kv = torch.randn(2, 10, 16, 1, 16, generator=generator)
        q, table = torch.randn(11, 3, 16, generator=generator), torch.arange(8, -1, -1)
        slots = torch.zeros(11, dtype=torch.int64)
        plan = TokenPlan(slots, table, slots, torch.arange(123, 134))
        own = torch.stack((key_panels(kv[0]), kv[1]))
        twin = make_plan([PlacedRow(0, 11, 133, table.numpy())], slots, 16)
        for scoring in (Scoring(0.25), Scoring(0.25, 5.0, 13)):
            expected = reference.paged_attention(q, kv, twin, scoring)
            yield self.attention(q, own, plan, scoring), expected


def _done(status: int) -> None:
    if status:
        raise MemoryError("no memory for a kernel")


def _agree(result: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((result - expected).abs().max() <= _TOLERANCE * expected.abs().max())


def _samples(generator: torch.Generator) -> list[BlockMatrix]:
    """Make a matrix of each kind, (69, 96): four whole panels and five outputs."""
    scales = torch.rand(69, 3, 2, generator=generator).view(torch.uint8)
    values = torch.randint(0, 256, (69, 3, 32), generator=generator, dtype=torch.uint8)
    q4 = torch.cat((scales, values[..., :16]), dim=-1)
    q8 = torch.cat((scales[..., :4], values), dim=-1)
    halves = torch.cat((scales, values), dim=-1)
    floats = torch.randn(69, 96, generator=generator)
    return [from_float(floats), *(BlockMatrix(g.reshape(69, -1), 96) for g in (q4, q8, halves))]
