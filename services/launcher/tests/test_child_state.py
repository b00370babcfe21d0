"""The life of a child as a pure state machine."""

import pytest

from headrace_launcher.child_state import (
    ChildLife,
    ChildState,
    GiveUp,
    Gone,
    Restart,
    RestartPolicy,
    describe_exit,
)


def ready_child() -> ChildLife:
    life = ChildLife(RestartPolicy())
    life.spawned(7)
    life.probed(ready=True)
    return life


def test_becomes_ready_when_the_probe_says_so() -> None:
    """Starting lasts until the first good probe."""
    life = ChildLife(RestartPolicy())
    life.spawned(7)
    assert (life.state, life.pid) == (ChildState.STARTING, 7)
    assert not life.probed(ready=False)
    assert life.probed(ready=True)
    assert life.state is ChildState.READY


def test_a_bad_probe_makes_a_ready_child_not_ready_and_a_good_one_ready_again() -> None:
    """Not ready is a state, not an end."""
    life = ready_child()
    assert life.probed(ready=False)
    assert life.state is ChildState.UNREADY
    assert life.probed(ready=True)
    assert life.state is ChildState.READY


def test_waits_longer_after_each_crash_up_to_a_limit() -> None:
    """The pause doubles from 0.2 s to at most 5 s."""
    life = ChildLife(RestartPolicy(max_crashes=100))
    delays = []
    for _ in range(7):
        life.spawned(7)
        action = life.exited(-9, now_s=0.0)
        assert isinstance(action, Restart)
        delays.append(action.delay_s)
    assert delays == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
    assert life.num_restarts == 7


def test_gives_up_at_the_fifth_crash_within_a_minute() -> None:
    """Five crashes in 60 s end the fleet, also if the child was ready between them."""
    life = ChildLife(RestartPolicy())
    for crash in range(4):
        life.spawned(7)
        life.probed(ready=True)
        assert isinstance(life.exited(1, now_s=crash * 14.0), Restart)
    life.spawned(7)
    assert life.exited(1, now_s=59.0) == GiveUp("crashed 5 times within 60 s")
    assert life.state is ChildState.FAILED


def test_crashes_long_ago_do_not_count() -> None:
    """Only the window's crashes count, and the pause starts small again."""
    life = ChildLife(RestartPolicy())
    for crash in range(20):
        life.spawned(7)
        assert life.exited(1, now_s=crash * 61.0) == Restart(0.2)


def test_a_child_that_drained_has_not_crashed() -> None:
    """Somebody restarts it, as often as they like; one that was never ready has no work to end."""
    life = ChildLife(RestartPolicy(max_crashes=2))
    for _ in range(9):
        life.spawned(7)
        life.probed(ready=True)
        assert life.exited(0, now_s=0.0) == Restart(0.2)
    assert life.num_restarts == 9
    life.spawned(7)
    assert life.exited(0, now_s=0.0) == Restart(0.2)
    life.spawned(7)
    assert isinstance(life.exited(0, now_s=0.0), GiveUp)


def test_a_child_that_hands_over_has_not_crashed() -> None:
    """Its successor may start at once, unless the fleet stops."""
    life = ready_child()
    life.left()
    assert (life.state, life.pid, life.num_restarts) == (ChildState.BACKOFF, None, 1)
    life.spawned(8)
    assert life.state is ChildState.STARTING
    life.stop()
    life.left()
    assert life.state is ChildState.STOPPING


def test_bad_settings_at_the_start_are_not_tried_again() -> None:
    """Exit code 2 before the first ready means that the same start would fail again."""
    life = ChildLife(RestartPolicy())
    life.spawned(7)
    assert life.exited(2, now_s=0.0) == GiveUp("refused its settings")


def test_exit_code_two_of_a_child_that_ran_is_a_crash_like_any_other() -> None:
    """Its settings were good."""
    assert ready_child().exited(2, now_s=0.0) == Restart(0.2)


def test_a_child_that_was_asked_to_stop_is_gone_whatever_its_exit_code() -> None:
    """No restart after stop."""
    life = ready_child()
    life.stop()
    assert life.state is ChildState.STOPPING
    assert life.exited(-15, now_s=0.0) == Gone()
    assert life.state is ChildState.STOPPED


def test_stop_of_a_child_that_never_ran_is_immediate_and_a_late_process_is_unwanted() -> None:
    """A process that appears after stop is on its way out."""
    life = ChildLife(RestartPolicy())
    life.stop()
    assert life.state is ChildState.STOPPED
    life.spawned(7)
    assert life.state is ChildState.STOPPING


def test_a_child_that_failed_stays_failed() -> None:
    """The state that explains the end of the fleet is not overwritten by its stop."""
    life = ready_child()
    life.start_failed("was not ready within 60 s")
    life.stop()
    assert life.exited(-15, now_s=0.0) == Gone()
    assert life.state is ChildState.FAILED


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "killed by SIGKILL"),
        (-99, "killed by signal 99"),
    ],
)
def test_says_how_a_process_ended(code: int, words: str) -> None:
    """Signals are named."""
    assert describe_exit(code) == words
