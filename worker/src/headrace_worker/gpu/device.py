"""The GPU at hand, or what is missing."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib import metadata

import torch

from headrace_common.errors import Unavailable

_LEAST_CAPABILITY = (8, 0)
_NEEDS = (
    "needed are one NVIDIA GPU of compute capability 8.0 or newer with its driver, a torch built "
    "for CUDA, and triton 3.6 or newer; `make ... GPU_PYTHON=/path/to/python` chooses the Python "
    "that has them"
)


@dataclass(frozen=True)
class Device:
    """What figures were taken on.

    Attributes:
        capability: compute capability, e.g. "9.0".
        processors: streaming multiprocessors.
    """

    name: str
    capability: str
    memory_bytes: int
    processors: int
    torch: str
    cuda: str
    triton: str


def require() -> Device:
    """Return the first GPU.

    Raises:
        Unavailable: there is none, or it cannot be used; says what is needed.
    """
    if importlib.util.find_spec("triton") is None:
        raise Unavailable(f"triton is not installed; {_NEEDS}")
    if not torch.cuda.is_available():
        raise Unavailable(f"torch {torch.__version__} sees no CUDA device; {_NEEDS}")
    facts = torch.cuda.get_device_properties(0)
    if (facts.major, facts.minor) < _LEAST_CAPABILITY:
        raise Unavailable(f"{facts.name} has capability {facts.major}.{facts.minor}; {_NEEDS}")
    return Device(
        name=facts.name,
        capability=f"{facts.major}.{facts.minor}",
        memory_bytes=facts.total_memory,
        processors=facts.multi_processor_count,
        torch=torch.__version__,
        cuda=torch.version.cuda or "",
        triton=metadata.version("triton"),
    )
