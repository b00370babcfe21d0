"""One supervised process as a pure state machine: no I/O, no clock of its own."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from enum import StrEnum

from headrace_common.settings import EXIT_BAD_SETTINGS

_FIRST_DELAY_S = 0.2
_MAX_DELAY_S = 5.0


class ChildState(StrEnum):
    """Where a child is in its life; the value is what `headrace status` shows."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    UNREADY = "not ready"
    BACKOFF = "restarting"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class RestartPolicy:
    """When a child that keeps crashing takes the fleet down with it."""

    max_crashes: int = 5
    crash_window_s: float = 60.0


@dataclass(frozen=True)
class Restart:
    """Start the child again after the delay."""

    delay_s: float


@dataclass(frozen=True)
class GiveUp:
    """The child will not come up; the fleet must stop. The reason is a clause for people."""

    reason: str


@dataclass(frozen=True)
class Gone:
    """The child ended because it was asked to."""


ExitAction = Restart | GiveUp | Gone


@dataclass
class ChildLife:
    """A child's state and crash history.

    ::

        WAITING --spawned--> STARTING --probe ok--> READY <--probe--> UNREADY
                                ^                     |                 |
                                |                     v exit            v exit
                                +---delay over--- BACKOFF <-------------+
                                                      |  too many crashes, bad settings
        any --stop--> STOPPING --exit--> STOPPED      +----> FAILED

    A process that is told to stop by somebody else, and hands over, is one that has exited, though
    it still drains; that is no crash.
    Times are monotonic seconds, passed in.
    """

    policy: RestartPolicy
    state: ChildState = ChildState.WAITING
    pid: int | None = None
    num_restarts: int = 0
    _crashes_s: list[float] = field(default_factory=list)
    _was_ready: bool = False

    def spawned(self, pid: int) -> None:
        """A process exists."""
        self.pid = pid
        is_unwanted = self.state in (ChildState.STOPPING, ChildState.STOPPED)
        self.state = ChildState.STOPPING if is_unwanted else ChildState.STARTING

    def probed(self, ready: bool) -> bool:
        """Take a probe's answer; tell whether the state changed."""
        before = self.state
        if ready and before in (ChildState.STARTING, ChildState.UNREADY):
            self.state = ChildState.READY
            self._was_ready = True
        elif not ready and before is ChildState.READY:
            self.state = ChildState.UNREADY
        return self.state is not before

    def stop(self) -> None:
        """The child is to end, for good."""
        if self.state is ChildState.FAILED:
            return
        self.state = ChildState.STOPPED if self.pid is None else ChildState.STOPPING

    def left(self) -> None:
        """Somebody has told the process to stop; while it does, the next one is made."""
        self.pid = None
        if self.state not in (ChildState.STOPPING, ChildState.STOPPED, ChildState.FAILED):
            self._again(0.0)

    def exited(self, code: int, now_s: float) -> ExitAction:
        """The process ended with *code* (negative: by that signal); say what to do."""
        self.pid = None
        if self.state in (ChildState.STOPPING, ChildState.STOPPED):
            self.state = ChildState.STOPPED
            return Gone()
        if self.state is ChildState.FAILED:
            return Gone()
        if code == EXIT_BAD_SETTINGS and not self._was_ready:
            return self._fail("refused its settings")
        if code == 0 and self.state in (ChildState.READY, ChildState.UNREADY):
            # Drained: somebody told it to stop, which is how one is restarted.
            return self._again(_FIRST_DELAY_S)
        return self._crashed(now_s)

    def start_failed(self, reason: str) -> GiveUp:
        """The process could not be made, or did not get ready in time."""
        return self._fail(reason)

    def _crashed(self, now_s: float) -> ExitAction:
        window_s = self.policy.crash_window_s
        self._crashes_s = [t for t in self._crashes_s if now_s - t < window_s] + [now_s]
        if len(self._crashes_s) >= self.policy.max_crashes:
            return self._fail(f"crashed {len(self._crashes_s)} times within {window_s:.0f} s")
        exponent = len(self._crashes_s) - 1
        return self._again(min(_FIRST_DELAY_S * 2**exponent, _MAX_DELAY_S))

    def _again(self, delay_s: float) -> Restart:
        self.state = ChildState.BACKOFF
        self.num_restarts += 1
        return Restart(delay_s)

    def _fail(self, reason: str) -> GiveUp:
        self.state = ChildState.FAILED
        return GiveUp(reason)


def describe_exit(code: int) -> str:
    """Say in words how a process ended."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
