"""The only place that chooses which implementation of an operation runs.

A backend is a set of the operations below; `headrace_worker.kernels.reference` describes each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace_common.errors import InvalidRequest, Unavailable, Unimplemented
from headrace_worker.kernels import reference
from headrace_worker.kernels.compiler import default_cache_dir, ensure_compiled
from headrace_worker.kernels.native import NativeKernels
from headrace_worker.kernels.reference import AttentionPlan, Scoring

_CPU, _TORCH, _TRITON = "cpu", "torch", "triton"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """One backend's operations."""

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    gelu_mul: Callable[[torch.Tensor], torch.Tensor]
    apply_rope: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    write_kv: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    paged_attention: Callable[[torch.Tensor, torch.Tensor, AttentionPlan, Scoring], torch.Tensor]


def kernels_for(backend: str) -> Kernels:
    """Return the operations of a backend.

    Raises:
        Unimplemented: "triton", which this build has no kernels for.
        InvalidRequest: no such backend.
    """
    if backend in (_CPU, _TORCH):
        return Kernels(
            rms_norm=reference.rms_norm,
            silu_mul=reference.silu_mul,
            gelu_mul=reference.gelu_mul,
            apply_rope=reference.apply_rope,
            write_kv=reference.write_kv,
            paged_attention=reference.paged_attention,
        )
    if backend == _TRITON:
        raise Unimplemented("The triton backend has no kernels yet; use the backend 'cpu'.")
    known = (_CPU, _TORCH, _TRITON)
    raise InvalidRequest(f"no kernel backend {backend!r}; known: {known}")


def native_for(backend: str, cache_dir: Path | None = None) -> NativeKernels | None:
    """Return the C kernels of a backend; None if it has none or they cannot be made here.

    The second case is logged: everything works without them, only slower.

    Args:
        backend: "cpu" has them, "torch" does without.
        cache_dir: where compiled kernels are kept; None = a folder in the user's home.
    """
    if backend != _CPU:
        return None
    try:
        return NativeKernels(ensure_compiled(cache_dir or default_cache_dir()))
    except Unavailable as error:
        _log.warning("decoding without compiled kernels: %s", error)
        return None
