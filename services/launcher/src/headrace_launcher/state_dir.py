"""The folder in which a fleet keeps everything: its files, who owns it, what it says of itself."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import TextIO

import psutil

from headrace_launcher.fleet_view import FleetState, FleetView

_OVER = (FleetState.STOPPED, FleetState.FAILED)
_REAPER_WAIT_S = 6.0
_SAME_START_S = 1.0


class StateDirBusyError(Exception):
    """Another supervisor owns the folder; the message names its process."""


class StateDir:
    """Paths and files of one state directory. Commands may read it, one supervisor owns it."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self._lock: TextIO | None = None

    @property
    def logs(self) -> Path:
        """Folder of one log per child."""
        return self.path / "logs"

    @property
    def first_key(self) -> Path:
        """The API key made on the first start; readable by its owner only."""
        return self.path / "first-key"

    @property
    def fleet_json(self) -> Path:
        """The last `FleetView`."""
        return self.path / "fleet.json"

    def log_of(self, name: str) -> Path:
        """Return the log file of a child."""
        return self.logs / f"{name}.log"

    def create(self) -> None:
        """Make the folder, private to its owner, and those in it.

        Raises:
            OSError: it cannot be made or written to.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("logs", "traces", "outbox", "valkey"):
            (self.path / name).mkdir(exist_ok=True)
        probe = self.path / ".write-test"
        probe.write_text("ok")
        probe.unlink()

    def lock(self) -> None:
        """Become the owner, until this process and its reaper have ended.

        A killed supervisor leaves the lock to its reaper for a few seconds; that is waited for.

        Raises:
            StateDirBusyError: another process is.
        """
        lock = (self.path / "lock").open("a+")
        deadline_s = time.monotonic() + _REAPER_WAIT_S
        while not _try_lock(lock):
            pid = _pid_in(lock)
            if (pid and psutil.pid_exists(pid)) or time.monotonic() > deadline_s:
                lock.close()
                raise StateDirBusyError(
                    f"a fleet runs in {self.path} already (process {pid or 'unknown'}). "
                    f"See it with `headrace status`, stop it with `headrace down`, "
                    f"or start another one with --state-dir and --port"
                )
            time.sleep(0.1)
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._lock = lock

    def lock_descriptor(self) -> int:
        """Return the lock's file descriptor, for the reaper to hold it too."""
        if self._lock is None:
            raise ValueError("not locked")
        return self._lock.fileno()

    def unlock(self) -> None:
        """Give the folder back."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write_view(self, view: FleetView) -> None:
        """Replace ``fleet.json`` in one step."""
        draft = self.fleet_json.with_suffix(".json.new")
        draft.write_text(view.to_json())
        draft.replace(self.fleet_json)

    def read_view(self) -> FleetView | None:
        """Read ``fleet.json``; None if there is none.

        Raises:
            ValueError: the file is damaged, of another version, or cannot be read.
        """
        try:
            return FleetView.from_json(self.fleet_json.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ValueError(f"cannot be read: {error.strerror}") from error

    def running_view(self) -> FleetView | None:
        """Read ``fleet.json``, but only if its supervisor lives and has not ended the fleet."""
        view = self.read_view()
        return view if view is not None and is_running(view) else None


def is_running(view: FleetView) -> bool:
    """Return whether the supervisor of *view* lives and has not ended the fleet."""
    return view.state not in _OVER and supervisor_of(view) is not None


def supervisor_of(view: FleetView) -> psutil.Process | None:
    """Return the process that wrote *view* if it still runs: the same one, not just its number."""
    try:
        process = psutil.Process(view.pid)
        is_same = abs(process.create_time() - view.pid_created_s) < _SAME_START_S
        return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def own_identity() -> tuple[int, float]:
    """Return this process's id and its time of creation (Unix seconds)."""
    return os.getpid(), psutil.Process().create_time()


def _try_lock(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _pid_in(lock: TextIO) -> int | None:
    lock.seek(0)
    text = lock.read().strip()
    return int(text) if text.isdigit() else None
