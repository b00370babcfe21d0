"""The engine's own bench, on the toy model."""

import json

from headrace_testing import byte_tokenizer
from headrace_testing.toy_runner import ToyRunner
from headrace_worker import bench
from headrace_worker.bench import Sizes, measure
from headrace_worker.engine.token_table import TokenTable
from headrace_worker.model.info import ModelInfo
from headrace_worker.model_host import ReadyModel


def toy() -> ReadyModel:
    data = byte_tokenizer.tokenizer_json()
    info = ModelInfo(
        fingerprint="f" * 64,
        context_tokens=2000,
        vocab_size=byte_tokenizer.VOCAB_SIZE,
        chat_template="",
        eos_token_ids=(byte_tokenizer.IM_END_ID,),
        bos_token_id=None,
        add_bos=False,
        tokenizer_json=data,
        special_tokens={},
        kv_bytes_per_token=4,
        created_unix_s=0,
    )
    return ReadyModel(info, ToyRunner(256, may_end=False), TokenTable.from_json(data), 256)


def test_measures_every_figure(tmp_path):
    """A rate for each batch size, what a cached prefix is worth, and a timeline of it all."""
    sizes = Sizes(prompt_tokens=64, context_tokens=16, output_tokens=4, batch_sizes=(1, 3))
    figures = json.loads(json.dumps(measure(toy(), sizes, 32, tmp_path / "steps.json")))
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
