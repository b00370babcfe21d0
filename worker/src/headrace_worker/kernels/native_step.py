"""Whole steps of one model in one foreign call: all layers and the head."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace_worker.kernels.native import NativeKernels
from headrace_worker.kernels.native_types import (
    HeadShape,
    Layer,
    Model,
    PanelMatrix,
    Step,
    TokenPlan,
    kv_view_of,
    matrix_of,
    pointer,
    scoring_of,
)
from headrace_worker.kernels.plan import Scoring
from headrace_worker.kernels.rounding import Rounding

# Cosines and sines, (T, D/2) each.
HalfRope = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class StepLayer:
    """One layer as the step takes it; vectors as in `model.weights.LayerWeights`."""

    attention_norm: torch.Tensor
    ffn_norm: torch.Tensor
    qkv: PanelMatrix
    attention_out: PanelMatrix
    gate_up: PanelMatrix
    down: PanelMatrix
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
    head: PanelMatrix
    has_gelu: bool = False
    logit_soft_cap: float = 0.0


class NativeStep:
    """Runs whole steps of one model; keeps what the C side points to alive."""

    def __init__(
        self, kernels: NativeKernels, model: StepModel, rounding: Rounding = Rounding.FLOAT32
    ) -> None:
        self._kernels = kernels
        self._kept = model
        self._layers = (Layer * len(model.layers))(*map(_layer, model.layers))
        self._model = Model(
            len(model.layers),
            model.layers[0].qkv.num_in,
            model.layers[0].down.num_in,
            model.has_gelu,
            rounding,
            HeadShape(model.num_heads, model.num_kv_heads, model.head_dim),
            model.eps,
            model.logit_soft_cap,
            ctypes.addressof(self._layers),
            pointer(model.final_norm),
            matrix_of(model.head),
        )

    def __call__(
        self,
        hidden: torch.Tensor,
        ropes: tuple[HalfRope, HalfRope],
        kv: torch.Tensor,
        plan: TokenPlan,
        wanted: torch.Tensor,
        *,
        logits: bool = True,
    ) -> torch.Tensor:
        """Compute all layers and what is wanted.

        Args:
            hidden: (T, E) embeddings; overwritten.
            ropes: cosines and sines, (T, D/2) each, of all-seeing and of windowed layers.
            kv: (layers, 2, N, S, K, D) the KV pool; the tokens' slots are written.
            plan: where the tokens write and what they see.
            wanted: int64, ascending, the tokens whose result is wanted.
            logits: False = their states behind the last norm are enough.

        Returns:
            (len(wanted), V) logits, or (len(wanted), E) states.
        """
        states = torch.empty(len(wanted), hidden.shape[1])
        result = torch.empty(len(wanted), self._kept.head.num_out) if logits else states
        step = Step(
            len(hidden),
            len(wanted),
            pointer(hidden),
            *(pointer(part) for rope in ropes for part in rope),
            pointer(wanted),
            pointer(states),
            pointer(result) if logits else None,
            kv_view_of(kv[0], plan),
            kv.stride(0),
        )
        run = self._kernels.library.hr_step
        if run(self._kernels.context, ctypes.byref(self._model), ctypes.byref(step)):
            raise MemoryError("no memory for a step")
        return result


def _layer(layer: StepLayer) -> Layer:
    matrices = (layer.qkv, layer.attention_out, layer.gate_up, layer.down)
    optional = (
        layer.qkv_bias,
        layer.q_norm,
        layer.k_norm,
        layer.attention_post_norm,
        layer.ffn_post_norm,
    )
    return Layer(
        pointer(layer.attention_norm),
        pointer(layer.ffn_norm),
        *map(matrix_of, matrices),
        *(None if vector is None else pointer(vector) for vector in optional),
        scoring_of(layer.scoring),
    )
