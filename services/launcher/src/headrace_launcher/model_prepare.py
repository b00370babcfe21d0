"""Turns a model file into the form that workers load fastest, once, in a process of its own."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_launcher.log_file import last_lines, rotate
from headrace_launcher.model_fetch import ModelError, Report
from headrace_launcher.process import ChildProcess, Spawner

_PHASES = {
    "lock": "waiting for another preparation",
    "hash": "reading the model",
    "tokenizer": "preparing the tokenizer",
    "weights": "preparing the weights",
    "done": "prepared",
}


def prepared_path(cache_dir: Path, model: Path) -> Path:
    """Return what workers load: a folder as it is, a GGUF file's prepared form.

    The prepared form is named by the file's name, place, size and time of change.
    """
    if model.is_dir():
        return model
    model = model.resolve()
    stat = model.stat()
    identity = f"{model}|{stat.st_size}|{stat.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return cache_dir / "prepared" / f"{model.stem}-{digest}"


async def prepare_model(
    model: Path,
    target: Path,
    log: Path,
    spawner: Spawner,
    environment: Mapping[str, str],
    report: Report,
) -> None:
    """Run the worker's preparation of *model* into *target*; nothing to do for a folder.

    It ends at once when that was done before.

    Raises:
        ModelError: it failed; the message ends with its last lines.
    """
    if model == target:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    rotate(log)
    argv = [sys.executable, "-m", "headrace_worker.prepare", str(model), str(target)]
    process = await spawner.start_piped(argv, environment, log, target.parent)
    try:
        await _follow(process, report)
        code = await process.wait()
    finally:
        await process.stop(1.0)
    if code != 0:
        tail = "".join(f"\n  | {line}" for line in last_lines(log))
        raise ModelError(
            f"preparing {model} failed (exit code {code}). Its log, {log}, ends:{tail}"
        )


async def _follow(process: ChildProcess, report: Report) -> None:
    if process.stdout is None:
        raise TypeError("the preparation was started without a pipe")
    async for line in process.stdout:
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if isinstance(message, dict) and isinstance(message.get("phase"), str):
            _report(message, report)


def _report(message: dict[str, Any], report: Report) -> None:  # Any: JSON values
    """Pass on ``{"phase": ..., "done": ..., "total": ...}``; the short phases have no bar."""
    phase, done, total = message["phase"], message.get("done"), message.get("total")
    ratio = None
    if isinstance(done, int) and isinstance(total, int) and total > 1:
        ratio = done / total
    report(ratio, _PHASES.get(phase, phase))
