"""The only place that chooses which implementation of an operation runs.

A backend is a set of the operations below; `headrace_worker.kernels.reference` describes each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace_common.errors import InvalidRequest, Unimplemented
from headrace_worker.kernels import reference
from headrace_worker.kernels.reference import AttentionPlan

_CPU, _TRITON = "cpu", "triton"


@dataclass(frozen=True)
class Kernels:
    """One backend's operations."""

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    apply_rope: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    write_kv: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    paged_attention: Callable[[torch.Tensor, torch.Tensor, AttentionPlan], torch.Tensor]


def kernels_for(backend: str) -> Kernels:
    """Return the operations of a backend.

    Raises:
        Unimplemented: "triton", which this build has no kernels for.
        InvalidRequest: no such backend.
    """
    if backend == _CPU:
        return Kernels(
            rms_norm=reference.rms_norm,
            silu_mul=reference.silu_mul,
            apply_rope=reference.apply_rope,
            write_kv=reference.write_kv,
            paged_attention=reference.paged_attention,
        )
    if backend == _TRITON:
        raise Unimplemented("The triton backend has no kernels yet; use the backend 'cpu'.")
    raise InvalidRequest(f"no kernel backend {backend!r}; known: {_CPU!r}, {_TRITON!r}")
