"""How much memory a process may still take: its machine's, or its container's if that is less."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
# Of version 2 and 1: limit and use, and what is held of files that can be dropped.
_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def free_bytes(cgroups: Path = _CGROUPS) -> int:
    """Return what could be taken now without pushing anything out, as far as is known."""
    machine_bytes = psutil.virtual_memory().available
    container_bytes = _left_of_container(cgroups)
    return machine_bytes if container_bytes is None else min(machine_bytes, container_bytes)


def _left_of_container(cgroups: Path) -> int | None:
    """Return what the container's limit leaves; None = there is none, or it cannot be known."""
    for limit, used, statistics, droppable in _FILES:
        try:
            limit_text = (cgroups / limit).read_text().strip()
            used_bytes = int((cgroups / used).read_text())
            lines = (cgroups / statistics).read_text().splitlines()
        except (OSError, ValueError):
            continue
        if limit_text == "max":
            return None
        held = dict(line.split(maxsplit=1) for line in lines)
        return max(0, int(limit_text) - used_bytes + int(held.get(droppable, 0)))
    return None
