"""The only place that chooses which implementation of an operation runs.

A backend is a set of the operations below; `headrace_worker.kernels.reference` describes each.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace_common.errors import InvalidRequest, Unavailable
from headrace_worker.kernels import reference
from headrace_worker.kernels.compiler import default_cache_dir, ensure_compiled
from headrace_worker.kernels.cores import take_seat
from headrace_worker.kernels.native import NativeKernels
from headrace_worker.kernels.plan import PlacedRow, Scoring, make_plan
from headrace_worker.sampling import Sampled, SampleSpec, sample

_CPU, _TORCH, _TRITON = "cpu", "torch", "triton"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """One backend's operations."""

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    silu_mul: Callable[[torch.Tensor], torch.Tensor]
    gelu_mul: Callable[[torch.Tensor], torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rope_write_kv: Callable[..., torch.Tensor]
    paged_attention: Callable[[torch.Tensor, torch.Tensor, Any, Scoring], torch.Tensor]
    copy_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    # Makes what paged_attention takes, of rows, slots and block size.
    make_plan: Callable[[Sequence[PlacedRow], torch.Tensor, int], Any]
    sample: Callable[[torch.Tensor, Sequence[SampleSpec]], list[Sampled]] = sample
    # Makes a plan of one token a row of slots, contexts, tables and the longest context ever, whose
    # tensors may be filled anew, so that a step can be recorded; None = steps cannot.
    decode_plan: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], Any] | None = None


def kernels_for(backend: str, device: torch.device | None = None) -> Kernels:
    """Return the operations of a backend, for a device; None = the CPU.

    Raises:
        Unavailable: "triton", where Triton is not installed.
        InvalidRequest: no such backend.
    """
    if backend in (_CPU, _TORCH):
        return Kernels(
            rms_norm=reference.rms_norm,
            add_rms_norm=reference.add_rms_norm,
            silu_mul=reference.silu_mul,
            gelu_mul=reference.gelu_mul,
            rope_write_kv=reference.rope_write_kv,
            paged_attention=reference.paged_attention,
            copy_blocks=reference.copy_blocks,
            make_plan=make_plan,
        )
    if backend == _TRITON:
        return _triton(device or torch.device("cpu"))
    known = (_CPU, _TORCH, _TRITON)
    raise InvalidRequest(f"no kernel backend {backend!r}; known: {known}")


def _triton(device: torch.device) -> Kernels:
    # Loaded only where it is chosen: Triton comes with torch for GPUs, not with other builds.
    try:
        backend = importlib.import_module(f"{__package__}.triton.backend")
        tuning = importlib.import_module(f"{__package__}.triton.tuning")
    except ImportError as error:
        raise Unavailable(f"the backend 'triton' cannot be loaded here: {error}") from error
    kernels: Kernels = backend.kernels(Kernels, tuning.tuning_of(device))
    return kernels


def native_for(
    backend: str, cache_dir: Path | None = None, num_threads: int = 1
) -> NativeKernels | None:
    """Return the C kernels of a backend; None if it has none or they cannot be made here.

    The second case is logged: everything works without them, only slower.

    Args:
        backend: "cpu" has them, "torch" does without.
        cache_dir: where compiled kernels are kept; None = a folder in the user's home. Workers with
            the same folder and the same cores leave cores to one another.
        num_threads: threads that they compute with, at most.
    """
    if backend != _CPU:
        return None
    folder = cache_dir or default_cache_dir()
    try:
        return NativeKernels(ensure_compiled(folder), num_threads, take_seat(folder))
    except Unavailable as error:
        _log.warning("computing without compiled kernels: %s", error)
        return None
