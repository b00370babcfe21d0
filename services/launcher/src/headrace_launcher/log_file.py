"""Log files of children: bounded, and readable in a few lines when something went wrong."""

from __future__ import annotations

import shutil
from collections import deque
from pathlib import Path

MAX_LOG_BYTES = 32 * 2**20


def rotate(path: Path) -> None:
    """Move the log of an earlier fleet out of the way; one is kept, as ``<name>.log.1``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.replace(path.with_suffix(".log.1"))


def cut_if_long(path: Path, max_bytes: int = MAX_LOG_BYTES) -> bool:
    """Move the content of a log that is being written to ``<name>.log.1`` once it is too long.

    The writer has the file open for appending, so it goes on at the new end. Lines written between
    the copy and the cut are lost.
    """
    if not path.exists() or path.stat().st_size <= max_bytes:
        return False
    shutil.copyfile(path, path.with_suffix(".log.1"))
    with path.open("r+b") as file:
        file.truncate(0)
    return True


def last_lines(path: Path, num_lines: int = 12) -> list[str]:
    """Return the end of a log; empty if there is none."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, maxlen=num_lines)]
    except FileNotFoundError:
        return []
