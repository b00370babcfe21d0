"""Damaged models: each is refused in one line, and none is run on kernels that trust its sizes."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace_common.errors import InvalidRequest
from headrace_testing.tiny_model import write_gguf, write_hf_folder
from headrace_worker.model.damage import refusing_damage
from headrace_worker.model.loader import load_model
from headrace_worker.prepare import prepare

# Where all of a tiny GGUF's header lies.
_HEADER_BYTES = 12_000
MANY = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "m.gguf"
    write_gguf(path)
    return path.read_bytes()


@MANY
@given(share=st.floats(0, 0.999))
def test_a_gguf_that_is_cut_off_is_refused(gguf: bytes, tmp_path: Path, share: float) -> None:
    """In the header, between tensors or in the last one; and nothing is left of the try."""
    source = tmp_path / "m.gguf"
    source.write_bytes(gguf[: int(len(gguf) * share)])
    with pytest.raises(InvalidRequest):
        prepare(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@MANY
@given(place=st.integers(0, _HEADER_BYTES), bit=st.integers(0, 7))
def test_a_gguf_with_a_wrong_bit_is_refused_or_read(
    gguf: bytes, tmp_path: Path, place: int, bit: int
) -> None:
    """A bit of a length, a kind or a name; some, as those of a token's text, cannot be noticed."""
    damaged = bytearray(gguf)
    damaged[place] ^= 1 << bit
    (tmp_path / "m.gguf").write_bytes(damaged)
    with suppress(InvalidRequest):
        prepare(tmp_path / "m.gguf", tmp_path / f"out-{place}-{bit}")


@pytest.mark.parametrize("share", [0, 0.3, 0.98])
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
def test_a_folder_with_a_file_cut_off_is_refused(tmp_path: Path, name: str, share: float) -> None:
    """Each reader fails in its own way."""
    write_hf_folder(tmp_path)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(InvalidRequest):
        load_model(tmp_path)


@pytest.mark.parametrize("wrong", [None, 0, -1, 3, 48, 0.5, "x", [], 10**9])
@pytest.mark.parametrize(
    "name", ["hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"]
)
def test_a_config_that_does_not_fit_the_weights_is_refused(
    tmp_path: Path, name: str, wrong: object
) -> None:
    """Kernels would read beyond the weights, and ids beyond the embedding be let in."""
    write_hf_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, name: wrong}))
    with pytest.raises(InvalidRequest):
        load_model(tmp_path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """The key that a reader looked for, and where."""
    told = pytest.raises(InvalidRequest, match=r"/m is not a readable model: it lacks 'size'")
    with told, refusing_damage(tmp_path / "m", "model"):
        raise KeyError("size")
