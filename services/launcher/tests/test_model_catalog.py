"""Models by name, and models in several wheels."""

import asyncio
import hashlib
import os
from pathlib import Path

import pytest

from headrace_launcher import model_catalog
from headrace_launcher.model_catalog import MODELS, KnownModel, ensure_known_model
from headrace_launcher.model_fetch import ModelError, ModelSource
from headrace_launcher.process import Spawner
from headrace_launcher.settings import LauncherSettings

PIECES = (b"GGUF first half,", b" second half")
WHOLE = b"".join(PIECES)


def known(sha256: str = "") -> KnownModel:
    parts = tuple(
        ModelSource(f"part{idx}==1", 10, "", f"p/m.gguf.part{idx}", len(piece), "")
        for idx, piece in enumerate(PIECES)
    )
    return KnownModel(parts, "m.gguf", sha256 or hashlib.sha256(WHOLE).hexdigest(), "")


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for pip; return what was asked for."""
    asked: list[str] = []

    def write(piece: Path, content: bytes) -> Path:
        piece.parent.mkdir(parents=True, exist_ok=True)
        piece.write_bytes(content)
        return piece

    async def bring(folder: Path, source: ModelSource, *_: object) -> Path:
        asked.append(source.requirement)
        await asyncio.sleep(0)  # others' turn, as while pip runs
        return write(folder / source.file_name, PIECES[int(source.requirement[4])])

    monkeypatch.setattr(model_catalog, "ensure_model", bring)
    return asked


async def ensure(models: Path, model: KnownModel) -> Path:
    async with Spawner() as spawner:
        return await ensure_known_model(models, model, spawner, {}, lambda *_: None)


async def test_parts_become_one_file_once(tmp_path: Path, fetched: list[str]) -> None:
    """In order, checked as a whole; the parts do not stay, and nothing is fetched again."""
    model = await ensure(tmp_path, known())
    assert model.read_bytes() == WHOLE
    assert os.listdir(tmp_path) == ["m.gguf"]
    await ensure(tmp_path, known())
    assert fetched == ["part0==1", "part1==1"]
    model.write_bytes(b"damaged")
    assert (await ensure(tmp_path, known())).read_bytes() == WHOLE


async def test_two_at_once_fetch_one_after_the_other(tmp_path: Path, fetched: list[str]) -> None:
    """The second finds what the first brought, and nobody's parts vanish."""
    both = await asyncio.gather(ensure(tmp_path, known()), ensure(tmp_path, known()))
    assert [model.read_bytes() for model in both] == [WHOLE, WHOLE]
    assert fetched == ["part0==1", "part1==1"]


async def test_wrong_bytes_are_not_used(tmp_path: Path, fetched: list[str]) -> None:
    """A whole that is not what it should be is told and leaves no model behind."""
    with pytest.raises(ModelError, match=r"m\.gguf is not what it should be"):
        await ensure(tmp_path, known(sha256="0" * 64))
    assert not (tmp_path / "m.gguf").exists()
    assert len(fetched) == 2


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "smollm2-135m-instruct"),
        ({"model": "gemma3-270m"}, "gemma3-270m"),
        ({"model": "/m/Qwen2.5 0.5B.Q8_0.gguf"}, "qwen2.5-0.5b.q8_0"),
        ({"model": "/m/Llama-3.2-1B"}, "llama-3.2-1b"),
        ({"model": "/m/x.gguf", "model_name": "Mine"}, "Mine"),
    ],
)
def test_a_model_is_served_under_its_own_name(given: dict[str, str], name: str) -> None:
    """Not under the default model's, unless somebody says so."""
    assert LauncherSettings.load(**given).model_name == name


def test_every_known_model_has_a_checksum() -> None:
    """Of the whole and of each part."""
    for model in MODELS.values():
        assert len(model.sha256) == 64
        assert all(len(part.member_sha256) == len(part.wheel_sha256) == 64 for part in model.parts)
