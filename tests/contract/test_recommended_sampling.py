"""The worker's table of recommendations knows the file that the launcher fetches."""

from __future__ import annotations

from headrace_launcher.model_fetch import SMOLLM2
from headrace_worker.sampling_defaults import SamplingDefaults, recommended


def test_default_model_of_the_launcher_is_in_the_table() -> None:
    """Two services name one file by its SHA-256; neither imports the other."""
    assert recommended(SMOLLM2.member_sha256) != SamplingDefaults()
    assert recommended("0" * 64) == SamplingDefaults()
