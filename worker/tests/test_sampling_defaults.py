"""What a model is sampled with where a request names nothing: who says it, and who wins."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from headrace_common.errors import InvalidRequest
from headrace_common.settings import SettingsError
from headrace_testing.tiny_model import write_gguf, write_hf_folder
from headrace_worker.model.loader import load_model
from headrace_worker.model.prepared_folder import MANIFEST
from headrace_worker.prepare import ensure_prepared
from headrace_worker.sampling_defaults import SamplingDefaults, recommended, resolve
from headrace_worker.settings import WorkerSettings

SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def test_values_of_the_first_who_says_them() -> None:
    """Value by value: what one leaves open the next may say."""
    ours = SamplingDefaults(temperature=0.5, top_k=0)
    theirs = SamplingDefaults(temperature=0.7, top_k=20, min_p=0.1)
    assert ours.over(theirs) == SamplingDefaults(temperature=0.5, top_k=0, min_p=0.1)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("model", {"temperature": 0.7, "top_p": 0.8}),
        ("openai", {}),
        ('{"temperature": 1}', {"temperature": 1.0, "top_p": 0.8}),
        ('{"top_k": 20, "repetition_penalty": 1.1}',
         {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}),
        ("{}", {"temperature": 0.7, "top_p": 0.8}),
    ],
)  # fmt: skip
def test_operators_setting_wins(setting: str, expected: dict[str, float]) -> None:
    """A word, or values over what the model says."""
    model = SamplingDefaults(temperature=0.7, top_p=0.8)
    assert resolve(setting, model).said == expected


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("vllm", "right JSON"),
        ("[1]", "object"),
        ('{"temperature": 2.5}', "temperature: Input should be less than or equal to 2"),
        ('{"temperature": "hot"}', "temperature: Input should be a valid number"),
        ('{"temperature": true}', "temperature"),
        ('{"temperature": NaN}', "right JSON"),
        ('{"top_p": 0}', "top_p"),
        ('{"top_k": 1.5}', "top_k"),
        ('{"repetition_penalty": 0}', "repetition_penalty"),
        ('{"temprature": 1}', "temprature: Extra inputs are not permitted"),
    ],
)
def test_wrong_setting_stops_the_start(
    setting: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the variable and the value at fault."""
    monkeypatch.setenv("HEADRACE_WORKER_SAMPLING_DEFAULTS", setting)
    with pytest.raises(SettingsError, match="HEADRACE_WORKER_SAMPLING_DEFAULTS: ") as caught:
        WorkerSettings.load(model_path=Path("m.gguf"))
    assert told in str(caught.value)


def test_generation_config_says_what_it_has(tmp_path: Path) -> None:
    """Only its keys count, null is no word, and do_sample is not read."""
    write_hf_folder(tmp_path)
    assert load_model(tmp_path).info.sampling_defaults == SamplingDefaults()
    told = {"do_sample": False, "temperature": 0.6, "top_k": 20, "top_p": None, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(told))
    assert load_model(tmp_path).info.sampling_defaults.said == {"temperature": 0.6, "top_k": 20}


def test_wrong_value_of_a_model_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not the operator's mistake; the model serves without it, and the log says so."""
    told = {"temperature": "hot", "top_p": 7, "min_p": float("nan"), "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text(json.dumps(told))
    with caplog.at_level(logging.WARNING):
        found = SamplingDefaults.of_folder(tmp_path)
    assert found.said == {"repetition_penalty": 1.1}
    for name in ("generation_config.json", "temperature", "top_p", "min_p"):
        assert name in caplog.text


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_generation_config_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    """A file that cannot be read at all is told by its name."""
    (tmp_path / "generation_config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(InvalidRequest, match=r"generation_config\.json holds no JSON object"):
        SamplingDefaults.of_folder(tmp_path)


def test_gguf_says_it_in_its_metadata(tmp_path: Path) -> None:
    """llama.cpp's keys, 32-bit values as they were meant; a file beside it wins over them."""
    sampling = {"temp": 0.7, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "penalty_repeat": 1.05}
    write_gguf(tmp_path / "m.gguf", sampling={**sampling, "penalty_last_n": 64})
    folder = ensure_prepared(tmp_path / "m.gguf", tmp_path / "cache")
    assert load_model(folder).info.sampling_defaults == SamplingDefaults(
        temperature=0.7, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.05
    )
    (folder / "generation_config.json").write_text('{"temperature": 0.3}')
    found = load_model(folder).info.sampling_defaults
    assert (found.temperature, found.top_p) == (0.3, 0.95)


def test_folder_of_an_earlier_version_learns_its_source(tmp_path: Path) -> None:
    """The weights stay as they are; until it is prepared again it says nothing."""
    write_gguf(tmp_path / "m.gguf", sampling={"temp": 0.7})
    folder = ensure_prepared(tmp_path / "m.gguf", tmp_path / "cache")
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({k: manifest[k] for k in manifest if k != "source"}))
    weights = (folder / "model.safetensors").stat().st_ino
    assert load_model(folder).info.sampling_defaults == SamplingDefaults()
    assert ensure_prepared(tmp_path / "m.gguf", tmp_path / "cache") == folder
    assert load_model(folder).info.sampling_defaults.said == {"temperature": 0.7}
    assert json.loads((folder / MANIFEST).read_text()) == manifest
    assert (folder / "model.safetensors").stat().st_ino == weights


def test_table_stands_behind_what_a_file_says(tmp_path: Path) -> None:
    """A file of the table is known by its content; its own words win."""
    write_gguf(tmp_path / "m.gguf", sampling={"top_p": 0.5})
    folder = ensure_prepared(tmp_path / "m.gguf", tmp_path / "cache")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["source"]["sha256"] = SMOLLM2_SHA256
    (folder / MANIFEST).write_text(json.dumps(manifest))
    found, table = load_model(folder).info.sampling_defaults, recommended(SMOLLM2_SHA256)
    assert table.temperature is not None
    assert (found.temperature, found.top_p) == (table.temperature, 0.5)


def test_card_has_what_was_said_and_no_more() -> None:
    """Presence tells 0 from nothing; both spellings of "off" for top_k are 0."""
    card = SamplingDefaults(temperature=0.0, top_k=-1).to_card()
    assert card is not None
    assert (card.HasField("temperature"), card.HasField("top_k"), card.HasField("top_p")) == (
        True, True, False,
    )  # fmt: skip
    assert card.top_k == 0
    assert SamplingDefaults().to_card() is None
