"""The C structures of `kernels/cpu`, field by field, and how tensors get into them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from headrace_worker.kernels.blocks import BlockMatrix
from headrace_worker.kernels.plan import Scoring

# Positions whose keys lie side by side, and outputs whose weights do; `PANEL` of panels.h.
PANEL = 16
I64, PTR = ctypes.c_int64, ctypes.c_void_p


class Matrix(ctypes.Structure):
    """`matrix` of kernels.h."""

    _fields_ = (("blocks", PTR), ("kind", I64), ("num_out", I64), ("num_in", I64))


class KvView(ctypes.Structure):
    """`kv_view` of kernels.h."""

    _fields_ = (
        ("keys", PTR),
        ("values", PTR),
        ("slots", PTR),
        ("block_ids", PTR),
        ("table_start", PTR),
        ("context", PTR),
        ("block_size", I64),
    )


class HeadShape(ctypes.Structure):
    """`head_shape` of kernels.h."""

    _fields_ = (("num_heads", I64), ("num_kv_heads", I64), ("head_dim", I64))


class CScoring(ctypes.Structure):
    """`scoring` of kernels.h."""

    _fields_ = (("scale", ctypes.c_float), ("soft_cap", ctypes.c_float), ("window", I64))


class Layer(ctypes.Structure):
    """`layer` of step.c."""

    _fields_ = (
        ("attention_norm", PTR),
        ("ffn_norm", PTR),
        ("qkv", Matrix),
        ("attention_out", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("qkv_bias", PTR),
        ("q_norm", PTR),
        ("k_norm", PTR),
        ("attention_post_norm", PTR),
        ("ffn_post_norm", PTR),
        ("how", CScoring),
    )


class Model(ctypes.Structure):
    """`model` of step.c."""

    _fields_ = (
        ("num_layers", I64),
        ("hidden_size", I64),
        ("ffn_size", I64),
        ("has_gelu", I64),
        ("rounding", I64),
        ("heads", HeadShape),
        ("eps", ctypes.c_double),
        ("logit_soft_cap", ctypes.c_double),
        ("layers", PTR),
        ("final_norm", PTR),
        ("head", Matrix),
    )


class CDraw(ctypes.Structure):
    """`sampling` of sample.c."""

    _fields_ = (
        ("temperature", ctypes.c_float),
        ("top_p", ctypes.c_float),
        ("min_p", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("uniform", ctypes.c_double),
        ("row", I64),
    )


class Step(ctypes.Structure):
    """`step` of step.c."""

    _fields_ = (
        ("num_tokens", I64),
        ("num_logits", I64),
        ("hidden", PTR),
        ("cos", PTR),
        ("sin", PTR),
        ("local_cos", PTR),
        ("local_sin", PTR),
        ("logit_idx", PTR),
        ("states", PTR),
        ("logits", PTR),
        ("kv", KvView),
        ("layer_stride", I64),
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
class PanelMatrix:
    """A matrix in panels (panels.h).

    Attributes:
        data: all panels, uint8, contiguous.
        kind: as of `BlockMatrix`.
    """

    data: torch.Tensor
    kind: int
    num_out: int
    num_in: int


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    """Return where a contiguous tensor begins."""
    if not tensor.is_contiguous():
        raise ValueError("a kernel takes contiguous tensors only")
    return ctypes.c_void_p(tensor.data_ptr())


def matrix_of(weight: BlockMatrix | PanelMatrix) -> Matrix:
    """Return the structure that points to a matrix."""
    return Matrix(pointer(weight.data), weight.kind, weight.num_out, weight.num_in)


def scoring_of(scoring: Scoring) -> CScoring:
    """Return the structure of a scoring."""
    return CScoring(scoring.scale, scoring.soft_cap, scoring.window_tokens)


def key_panels(keys: torch.Tensor) -> torch.Tensor:
    """Return keys (N, S, K, D) in the order that the kernels keep them: (N, S / 16, K, D, 16)."""
    blocks, slots, heads, dim = keys.shape
    panels = keys.view(blocks, slots // PANEL, PANEL, heads, dim).permute(0, 1, 3, 4, 2)
    return panels.reshape(keys.shape)


def kv_view_of(kv: torch.Tensor, plan: TokenPlan) -> KvView:
    """Return one layer's pool kv (2, N, S, K, D), its keys as in `key_panels`, and the plan."""
    tables = (plan.slots, plan.block_ids, plan.table_start, plan.context)
    return KvView(pointer(kv[0]), pointer(kv[1]), *map(pointer, tables), kv.shape[2])
