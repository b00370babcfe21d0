"""A timeline of some steps, for the browser: chrome://tracing or ui.perfetto.dev open the file.

The format is the trace event format's array of complete events ("ph": "X"), times in microseconds.
A step is one event that holds its phases: schedule, model, sample, detokenise, hand out.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_log = logging.getLogger(__name__)

# Events kept at most; a window of that many steps has some five times as many.
MAX_STEPS = 10_000


class Timeline:
    """Notes the phases of the steps in a bounded window and writes them once it is full.

    On the engine's thread. Outside its window it costs a comparison a phase.

    Args:
        path: file to write; replaced if it is there.
        num_steps: length of the window.
        skipped_steps: steps before it, such as those that warm up.
    """

    def __init__(self, path: Path, num_steps: int, skipped_steps: int = 0) -> None:
        if not 0 < num_steps <= MAX_STEPS:
            raise ValueError(f"a profile has 1 to {MAX_STEPS} steps")
        self._path = path
        self._first, self._end = skipped_steps, skipped_steps + num_steps
        self._step_idx = -1
        self._events: list[dict[str, object]] = []
        self._sizes: dict[str, int] = {}
        self._is_written = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surround a step; the phases within belong to it."""
        self._step_idx += 1
        self._sizes = {}
        with self.phase("step"):
            yield
        if self._step_idx + 1 == self._end:
            self.write()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Surround a part of a step."""
        if not self._first <= self._step_idx < self._end:
            yield
            return
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            self._events.append(
                {
                    "name": name,
                    "ph": "X",
                    "ts": 1e6 * begin_s,
                    "dur": 1e6 * (time.perf_counter() - begin_s),
                    "pid": 1,
                    "tid": 1,
                    "args": {"step": self._step_idx, **self._sizes},
                }
            )

    def note_sizes(self, **sizes: int) -> None:
        """Say how large the step is; told with the phases that end from now on."""
        self._sizes.update(sizes)

    def write(self) -> None:
        """Write what was noted, once; an engine that ends within the window has fewer steps."""
        if self._is_written:
            return
        self._is_written = True
        names = [
            {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "headrace worker"}},
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "engine"}},
        ]
        trace = {"traceEvents": [*names, *self._events], "displayTimeUnit": "ms"}
        self._events = []
        try:
            self._path.write_text(json.dumps(trace), encoding="utf-8")
        except OSError as error:
            _log.warning("the profile could not be written: %s", error)


class NoTimeline:
    """Notes nothing; what an engine has unless a profile is wanted."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Do nothing around a step."""
        yield

    @contextmanager
    def phase(self, _name: str) -> Iterator[None]:
        """Do nothing around a part of it."""
        yield

    def note_sizes(self, **_sizes: int) -> None:
        """Forget it."""

    def write(self) -> None:
        """Write nothing."""
