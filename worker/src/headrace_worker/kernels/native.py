"""The C kernels behind the signatures of their twins in `kernels.reference`, and the whole step.

All calls release the interpreter lock. Tensors are float32, contiguous where not said otherwise.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace_common.errors import Unavailable
from headrace_worker.kernels import reference
from headrace_worker.kernels.blocks import BlockMatrix, from_float
from headrace_worker.kernels.plan import Scoring

# Cosines and sines, (T, D/2) each.
HalfRope = tuple[torch.Tensor, torch.Tensor]

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p
_OPERATIONS = ("linear", "rms_norm", "silu_mul", "gelu_mul", "rope", "write_kv", "attention")


class _Matrix(ctypes.Structure):
    _fields_ = (("blocks", _PTR), ("kind", _I64), ("num_out", _I64), ("num_in", _I64))


class _KvView(ctypes.Structure):
    _fields_ = (
        ("keys", _PTR),
        ("values", _PTR),
        ("slots", _PTR),
        ("block_ids", _PTR),
        ("table_start", _PTR),
        ("context", _PTR),
        ("block_size", _I64),
    )


class _HeadShape(ctypes.Structure):
    _fields_ = (("num_heads", _I64), ("num_kv_heads", _I64), ("head_dim", _I64))


class _Scoring(ctypes.Structure):
    _fields_ = (("scale", ctypes.c_float), ("soft_cap", ctypes.c_float), ("window", _I64))


class _Layer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", _PTR),
        ("ffn_norm", _PTR),
        ("qkv", _Matrix),
        ("attention_out", _Matrix),
        ("gate_up", _Matrix),
        ("down", _Matrix),
        ("qkv_bias", _PTR),
        ("q_norm", _PTR),
        ("k_norm", _PTR),
        ("attention_post_norm", _PTR),
        ("ffn_post_norm", _PTR),
        ("how", _Scoring),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("num_layers", _I64),
        ("hidden_size", _I64),
        ("ffn_size", _I64),
        ("has_gelu", _I64),
        ("heads", _HeadShape),
        ("eps", ctypes.c_double),
        ("logit_soft_cap", ctypes.c_double),
        ("layers", _PTR),
        ("final_norm", _PTR),
        ("head", _Matrix),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("num_tokens", _I64),
        ("num_logits", _I64),
        ("max_context", _I64),
        ("hidden", _PTR),
        ("cos", _PTR),
        ("sin", _PTR),
        ("local_cos", _PTR),
        ("local_sin", _PTR),
        ("logit_idx", _PTR),
        ("logits", _PTR),
        ("kv", _KvView),
        ("layer_stride", _I64),
    )


@dataclass(frozen=True)
class TokenPlan:
    """Where each token of a step writes and what it sees; all (T,) int64 but *block_ids*.

    Attributes:
        slots: slot that the token's key and value go to.
        block_ids: the rows' block tables, one after another.
        table_start: first entry of the token's table in *block_ids*.
        context: positions that the token sees, itself included.
    """

    slots: torch.Tensor
    block_ids: torch.Tensor
    table_start: torch.Tensor
    context: torch.Tensor


@dataclass(frozen=True)
class StepLayer:
    """One layer as the step takes it; vectors as in `model.weights.LayerWeights`."""

    attention_norm: torch.Tensor
    ffn_norm: torch.Tensor
    qkv: BlockMatrix
    attention_out: BlockMatrix
    gate_up: BlockMatrix
    down: BlockMatrix
    scoring: Scoring
    qkv_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    attention_post_norm: torch.Tensor | None = None
    ffn_post_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class StepModel:
    """A model as the step takes it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    layers: Sequence[StepLayer]
    final_norm: torch.Tensor
    head: BlockMatrix
    has_gelu: bool = False
    logit_soft_cap: float = 0.0


class NativeKernels:
    """The loaded library."""

    def __init__(self, library: Path) -> None:
        """Load it and try it out.

        Raises:
            Unavailable: it cannot be loaded, or computes something else than it should.
        """
        try:
            self._library = ctypes.CDLL(str(library))
        except OSError as error:
            raise Unavailable(f"the compiled kernels cannot be loaded: {error}") from error
        self._library.hr_step.restype = _I64
        for name in _OPERATIONS:
            getattr(self._library, f"hr_{name}").restype = None
        self._check()

    def linear(self, x: torch.Tensor, weight: BlockMatrix) -> torch.Tensor:
        """Return x W^T; x: (T, in)."""
        y = torch.empty(len(x), weight.num_out)
        matrix = _matrix(weight)
        self._library.hr_linear(_ptr(x), ctypes.byref(matrix), _ptr(y), _I64(len(x)), _I64(0))
        return y

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `reference.rms_norm`."""
        y = torch.empty_like(x)
        rows, size = map(_I64, x.shape)
        self._library.hr_rms_norm(_ptr(x), _ptr(weight), _ptr(y), rows, size, ctypes.c_float(eps))
        return y

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `reference.silu_mul`."""
        return self._gated(self._library.hr_silu_mul, gate_up)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `reference.gelu_mul`."""
        return self._gated(self._library.hr_gelu_mul, gate_up)

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """See `reference.apply_rope`; cos and sin are (T, D/2)."""
        y = x.clone()
        rows, heads, dim = x.shape
        sizes = map(_I64, (rows, heads * dim, heads, dim))
        self._library.hr_rope(_ptr(y), _ptr(cos), _ptr(sin), *sizes)
        return y

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, plan: TokenPlan) -> None:
        """See `reference.write_kv`."""
        shape = _HeadShape(0, *k.shape[1:])
        view, stride = _kv_view(kv, plan), _I64(k.shape[1] * k.shape[2])
        self._library.hr_write_kv(
            _ptr(k), _ptr(v), stride, ctypes.byref(view), _I64(len(k)), ctypes.byref(shape)
        )

    def attention(
        self, q: torch.Tensor, kv: torch.Tensor, plan: TokenPlan, scoring: Scoring
    ) -> torch.Tensor:
        """See `reference.paged_attention`; here each token has a table and context of its own."""
        rows, num_heads, head_dim = q.shape
        y = torch.empty_like(q)
        scores = torch.empty(num_heads * (int(plan.context.max()) + 8))
        shape = _HeadShape(num_heads, kv.shape[3], head_dim)
        view, stride = _kv_view(kv, plan), _I64(num_heads * head_dim)
        self._library.hr_attention(
            _ptr(q), stride, _ptr(y), _ptr(scores), ctypes.byref(view), _I64(rows),
            ctypes.byref(shape), ctypes.byref(_scoring(scoring)),
        )  # fmt: skip
        return y

    def _gated(
        self, operation: Any, gate_up: torch.Tensor
    ) -> torch.Tensor:  # Any: foreign function
        y = torch.empty(len(gate_up), gate_up.shape[1] // 2)
        operation(_ptr(gate_up), _ptr(y), *map(_I64, y.shape))
        return y

    def _check(self) -> None:
        """Compare one product of each kind of block with its twin."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(3, 64, generator=generator)
        for weight in _samples(generator):
            expected = reference.linear(x, weight)
            if not torch.allclose(self.linear(x, weight), expected, atol=1e-3, rtol=1e-4):
                raise Unavailable(f"the compiled kernels fail their check (kind {weight.kind})")


class NativeStep:
    """Runs whole steps of one model; keeps what the C side points to alive."""

    def __init__(self, kernels: NativeKernels, model: StepModel) -> None:
        self._run = kernels._library.hr_step
        self._kept = model
        self._layers = (_Layer * len(model.layers))(*map(_layer, model.layers))
        self._model = _Model(
            len(model.layers),
            model.layers[0].qkv.num_in,
            model.layers[0].down.num_in,
            model.has_gelu,
            _HeadShape(model.num_heads, model.num_kv_heads, model.head_dim),
            model.eps,
            model.logit_soft_cap,
            ctypes.addressof(self._layers),
            _ptr(model.final_norm),
            _matrix(model.head),
        )

    def __call__(
        self,
        hidden: torch.Tensor,
        ropes: tuple[HalfRope, HalfRope],
        kv: torch.Tensor,
        plan: TokenPlan,
        logit_idx: torch.Tensor,
    ) -> torch.Tensor:
        """Compute all layers and the wanted logits.

        Args:
            hidden: (T, E) embeddings; overwritten.
            ropes: cosines and sines, (T, D/2) each, of all-seeing and of windowed layers.
            kv: (layers, 2, N, S, K, D) the KV pool; the tokens' slots are written.
            plan: where the tokens write and what they see.
            logit_idx: int64, the tokens that want logits.

        Returns:
            (len(logit_idx), V).
        """
        logits = torch.empty(len(logit_idx), self._kept.head.num_out)
        step = _Step(
            len(hidden),
            len(logit_idx),
            int(plan.context.max()),
            _ptr(hidden),
            *(_ptr(part) for rope in ropes for part in rope),
            _ptr(logit_idx),
            _ptr(logits),
            _kv_view(kv[0], plan),
            kv.stride(0),
        )
        if self._run(ctypes.byref(self._model), ctypes.byref(step)):
            raise MemoryError("no memory for a step")
        return logits


def _ptr(tensor: torch.Tensor) -> ctypes.c_void_p:
    if not tensor.is_contiguous():
        raise ValueError("a kernel takes contiguous tensors only")
    return ctypes.c_void_p(tensor.data_ptr())


def _matrix(weight: BlockMatrix) -> _Matrix:
    return _Matrix(_ptr(weight.data), weight.kind, weight.num_out, weight.num_in)


def _layer(layer: StepLayer) -> _Layer:
    matrices = (layer.qkv, layer.attention_out, layer.gate_up, layer.down)
    optional = (
        layer.qkv_bias,
        layer.q_norm,
        layer.k_norm,
        layer.attention_post_norm,
        layer.ffn_post_norm,
    )
    return _Layer(
        _ptr(layer.attention_norm),
        _ptr(layer.ffn_norm),
        *map(_matrix, matrices),
        *(None if vector is None else _ptr(vector) for vector in optional),
        _scoring(layer.scoring),
    )


def _scoring(scoring: Scoring) -> _Scoring:
    return _Scoring(scoring.scale, scoring.soft_cap, scoring.window_tokens)


def _kv_view(kv: torch.Tensor, plan: TokenPlan) -> _KvView:
    tables = (plan.slots, plan.block_ids, plan.table_start, plan.context)
    return _KvView(_ptr(kv[0]), _ptr(kv[1]), *map(_ptr, tables), kv.shape[2])


def _samples(generator: torch.Generator) -> list[BlockMatrix]:
    """Make a small matrix of each kind, (5, 64)."""
    scales = torch.rand(5, 2, 2, generator=generator).view(torch.uint8)
    values = torch.randint(0, 256, (5, 2, 32), generator=generator, dtype=torch.uint8)
    q4 = torch.cat((scales, values[..., :16]), dim=-1)
    q8 = torch.cat((scales[..., :4], values), dim=-1)
    halves = torch.cat((scales, values), dim=-1)
    floats = torch.randn(5, 64, generator=generator)
    return [from_float(floats), *(BlockMatrix(g.reshape(5, -1), 64) for g in (q4, q8, halves))]
