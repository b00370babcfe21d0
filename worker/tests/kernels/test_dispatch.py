"""The choice of a backend."""

from __future__ import annotations

import pytest

from headrace_common.errors import InvalidRequest, Unimplemented
from headrace_worker.kernels import reference
from headrace_worker.kernels.dispatch import kernels_for


def test_cpu_runs_the_plain_operations() -> None:
    """The CPU backend takes every operation from the reference module."""
    for name, operation in kernels_for("cpu").__dict__.items():
        assert operation is getattr(reference, name)


def test_other_backends_are_refused() -> None:
    """triton says that it has no kernels yet; an unknown name is invalid."""
    with pytest.raises(Unimplemented, match="triton"):
        kernels_for("triton")
    with pytest.raises(InvalidRequest, match="'abacus'"):
        kernels_for("abacus")
