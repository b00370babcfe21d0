"""Where a model is loaded to."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from headrace_common.errors import Unavailable
from headrace_testing.tiny_model import write_hf_folder
from headrace_worker.model_host import ModelHost


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said(tmp_path: Path) -> None:
    """Nothing computes on the CPU by surprise."""
    write_hf_folder(tmp_path / "model")
    host = ModelHost(tmp_path / "model", tmp_path, 256, 1, device="cuda")
    with pytest.raises(Unavailable, match="no CUDA device"):
        host.load()


def test_the_pool_is_sized_as_asked(tmp_path: Path) -> None:
    """Whole blocks, by the tokens that were asked for."""
    write_hf_folder(tmp_path / "model")
    model = ModelHost(tmp_path / "model", tmp_path, 250, 1).load()
    assert model.num_blocks == 250 // 16


def test_the_collector_leaves_a_loaded_model_alone(tmp_path: Path) -> None:
    """A full collection looks through what came since, not through the model and its tokenizer."""
    write_hf_folder(tmp_path / "model")
    before = gc.get_freeze_count()
    model = ModelHost(tmp_path / "model", tmp_path, 250, 1).load()
    assert gc.get_freeze_count() > before
    assert not any(it is model.runner.__dict__ for it in gc.get_objects())
