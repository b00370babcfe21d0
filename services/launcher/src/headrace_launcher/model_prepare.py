"""Turns a model file into the form that workers load fastest, once, in a process of its own."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from headrace_launcher.log_file import last_lines, rotate
from headrace_launcher.model_fetch import ModelError, Report
from headrace_launcher.process import ChildProcess, Spawner


def prepared_folder(cache_dir: Path, model: Path) -> Path:
    """Return where the prepared form of *model* lies: by name, place, size and time of change."""
    model = model.resolve()
    stat = model.stat()
    identity = f"{model}|{stat.st_size}|{stat.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return cache_dir / "prepared" / f"{model.stem}-{digest}"


async def prepare_model(
    model: Path,
    cache_dir: Path,
    log: Path,
    spawner: Spawner,
    environment: Mapping[str, str],
    report: Report,
) -> Path:
    """Run the worker's preparation of *model*; it does nothing when that is done already.

    Raises:
        ModelError: it failed; the message ends with its last lines.
    """
    target = prepared_folder(cache_dir, model)
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
    return target


async def _follow(process: ChildProcess, report: Report) -> None:
    if process.stdout is None:
        raise TypeError("the preparation was started without a pipe")
    async for line in process.stdout:
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if isinstance(message, dict):
            ratio = message.get("progress_ratio")
            share = float(ratio) if isinstance(ratio, int | float) else None
            report(share, str(message.get("stage") or "preparing"))
