"""The engine's own bench, on the toy model."""

import json

from headrace_testing.toy_model import toy_model
from headrace_worker import bench
from headrace_worker.bench import Sizes, measure


def test_measures_every_figure(tmp_path):
    """A rate for each batch size, what a cached prefix is worth, and a timeline of it all."""
    sizes = Sizes(prompt_tokens=64, context_tokens=16, output_tokens=4, batch_sizes=(1, 3))
    figures = json.loads(
        json.dumps(measure(toy_model(2000, 256), sizes, 32, tmp_path / "steps.json"))
    )
    assert len(json.loads((tmp_path / "steps.json").read_text())["traceEvents"]) > 50
    assert figures["decode_tokens_per_s"].keys() == {"1", "3"}
    assert all(rate > 0 for rate in figures["decode_tokens_per_s"].values())
    assert figures["prefill_tokens_per_s"] > 0
    assert figures["cached_prefix_speedup_ratio"] > 0
    assert "batch 3:" in bench._text(figures)


def test_a_missing_model_is_told(tmp_path, capsys):
    """On stderr, with exit code 1."""
    assert bench.main([str(tmp_path / "none.gguf")]) == 1
    assert "no model at" in capsys.readouterr().err
