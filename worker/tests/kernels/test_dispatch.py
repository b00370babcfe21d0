"""The choice of a backend."""

from __future__ import annotations

import sys

import pytest

from headrace_common.errors import InvalidRequest, Unavailable
from headrace_worker import sampling
from headrace_worker.kernels import plan, reference
from headrace_worker.kernels.dispatch import kernels_for


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_cpu_runs_the_plain_operations(backend: str) -> None:
    """Every operation is the reference's, so are plans and draws, and no step is recorded."""
    operations = dict(kernels_for(backend).__dict__)
    assert operations.pop("make_plan") is plan.make_plan
    assert operations.pop("sample") is sampling.sample
    assert operations.pop("decode_plan") is None
    for name, operation in operations.items():
        assert operation is getattr(reference, name)


def test_triton_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what is missing."""
    name = "headrace_worker.kernels.triton.backend"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Unavailable, match="'triton' cannot be loaded here"):
        kernels_for("triton")


def test_an_unknown_backend_is_refused() -> None:
    """By its name."""
    with pytest.raises(InvalidRequest, match="'abacus'"):
        kernels_for("abacus")
