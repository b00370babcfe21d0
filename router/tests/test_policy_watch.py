"""A changed policy file is taken up."""

import os
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from headrace_router.metrics import RouterMetrics
from headrace_router.policy_file import PolicyFile
from headrace_router.policy_watch import PolicyWatch


class Watched:
    def __init__(self, path: Path) -> None:
        self.path, self.taken = path, list[PolicyFile]()
        self._time_ns = 1_000_000_000
        self.write('version = 1\n[pick]\npolicy = "hold"\n')
        self.metrics = RouterMetrics(CollectorRegistry())
        self.watch = PolicyWatch(path, self.taken.append, self.metrics)

    def write(self, text: str) -> None:
        self.path.write_text(text)
        self._time_ns += 1_000_000_000
        os.utime(self.path, ns=(self._time_ns, self._time_ns))


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "policy.toml")


def test_an_unchanged_file_is_left_alone(watched: Watched) -> None:
    """Nothing happens at a look alone."""
    assert not watched.watch.look()
    assert watched.taken == []


def test_a_change_is_taken_up_once(watched: Watched) -> None:
    """The policy switches while the router runs."""
    watched.write('version = 1\n[pick]\npolicy = "random"\n')
    assert watched.watch.look()
    assert not watched.watch.look()
    assert [file.pick.policy for file in watched.taken] == ["random"]


@pytest.mark.parametrize("text", ["version = 1\n[pick]\npolicy = 3\n", None], ids=["bad", "gone"])
def test_a_broken_file_changes_nothing(watched: Watched, text: str | None) -> None:
    """The former policy stays, and it is counted."""
    if text is None:
        watched.path.unlink()
    else:
        watched.write(text)
    assert not watched.watch.look()
    assert watched.taken == []
    assert watched.metrics.policy_reloads.labels("refused")._value.get() == 1
    watched.write('version = 1\n[pick]\npolicy = "random"\n')
    assert watched.watch.look()
